"""Adversarial training: two models, two optimizers, two Trainers.

paceline launch -n 2 examples/cookbook/adversarial.py

Each Trainer reduces the gradients of its own model only. The generator's loss calls the discriminator, so its backward
leaves gradients there; the discriminator's next step discards them.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import paceline


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = TensorDataset(0.5 * torch.randn(512, 2) + torch.tensor([2.0, -1.0]))
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def draw(model, real):  # noise that belongs to the samples: the same points on any number of ranks
        return model(paceline.noise(real.new_empty(len(real), 4)))

    def discriminator_loss(model, batch):
        with torch.no_grad():
            fake = draw(generator, batch[0])
        return softplus(-model(batch[0])).mean() + softplus(model(fake)).mean()

    def generator_loss(model, batch):
        return softplus(-discriminator(draw(model, batch[0]))).mean()

    # ddp: a model whose parameters are sharded can't be called inside the loss of another Trainer.
    settings = {"batch": 64, "strategy": "ddp", "run": False}
    judge = paceline.Trainer(discriminator, {"lr": 3e-3}, loss_fn=discriminator_loss, **settings)
    forger = paceline.Trainer(generator, {"lr": 3e-3}, loss_fn=generator_loss, **settings)

    def distance():
        """From the mean of the generated points to that of the data."""
        with torch.no_grad():
            points = generator(torch.randn(256, 4, generator=torch.Generator().manual_seed(0)).to(forger.world.device))
        return (points.mean(0).cpu() - data.tensors[0].mean(0)).norm().item()

    before = distance()
    for _ in range(args.epochs):
        for batch in judge.loader(data):
            judge.training_step(batch)
            forger.training_step(batch)
    if judge.is_main_process:
        print(f"distance of the means {before:.2f} -> {distance():.2f} after {forger.step_count} steps")


if __name__ == "__main__":
    main()
