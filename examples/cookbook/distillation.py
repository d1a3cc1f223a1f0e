"""Distillation: a student learns the outputs of a teacher that is not trained.

paceline launch -n 2 examples/cookbook/distillation.py

The teacher is not part of the trained model: it gets no gradients, no optimizer state and no place in checkpoints.
Every rank holds it and asks it for its own samples only.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.utils.data import TensorDataset

import paceline


def classifier(width):
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))


class Distill:
    """A mean over samples of both losses. `loss_fn` may be any callable, so it can hold the teacher."""

    def __init__(self, teacher, temperature=2.0, share=0.7):
        self.teacher, self.temperature, self.share = teacher.requires_grad_(False).eval(), temperature, share

    def __call__(self, model, batch):
        inputs, labels = batch
        self.teacher.to(inputs.device)
        soft = log_softmax(self.teacher(inputs) / self.temperature, dim=1)
        logits = model(inputs)
        student = log_softmax(logits / self.temperature, dim=1)
        distance = kl_div(student, soft, log_target=True, reduction="batchmean") * self.temperature**2
        return self.share * distance + (1 - self.share) * cross_entropy(logits, labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(1024, 8)
    data = TensorDataset(inputs, inputs[:, :4].square().argmax(1))
    held_out = torch.randn(256, 8)
    val_data = TensorDataset(held_out, held_out[:, :4].square().argmax(1))

    settings = {
        "batch": 64,
        "metrics": {"accuracy": lambda out, labels: (out.argmax(1) == labels).float()},
        "run": False,
    }
    teacher = paceline.Trainer(classifier(256), {"lr": 1e-2}, criterion=nn.CrossEntropyLoss(), **settings)
    teacher.train(data, epochs=args.epochs)

    student = paceline.Trainer(classifier(16), {"lr": 1e-2}, loss_fn=Distill(teacher.model), **settings)
    history = student.train(data, val_data, epochs=args.epochs)
    result = teacher.evaluate(val_data)
    if student.is_main_process:
        print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}")
        print(f"accuracy: teacher {result['accuracy']:.3f}, student {history.evaluations[-1]['accuracy']:.3f}")


if __name__ == "__main__":
    main()
