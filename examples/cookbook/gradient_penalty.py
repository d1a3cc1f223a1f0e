"""A gradient penalty: the loss contains the gradient of the model's output with respect to its input.

paceline launch -n 2 examples/cookbook/gradient_penalty.py

`torch.autograd.grad(…, create_graph=True)` inside `loss_fn` works under ddp, fsdp, hsdp, tp and `recompute: full`.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def slopes_of(model, inputs):
    inputs = inputs.detach().requires_grad_()
    outputs = model(inputs)
    (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return outputs, slopes.norm(dim=1)


def penalized_loss(model, batch, weight=10.0):
    inputs, targets = batch
    outputs, slopes = slopes_of(model, inputs)
    error = (outputs - targets).square().mean()
    return error + weight * (slopes - 1).relu().square().mean()  # slopes above 1 cost something


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--strategy", default="ddp")
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(512, 4)
    data = TensorDataset(inputs, 5 * inputs[:, :2].sin())

    def largest_slope(loss_fn):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        trainer = paceline.Trainer(model, {"lr": 1e-2}, batch=64, strategy=args.strategy, run=False, loss_fn=loss_fn)
        trainer.train(data, epochs=args.epochs)
        whole = trainer.state_dict()  # parameters may be sharded: rank 0 gets all of them
        if not trainer.is_main_process:
            return 0.0
        alone = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        alone.load_state_dict(whole)
        return slopes_of(alone, inputs)[1].max().item()

    free = largest_slope(lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
    penalized = largest_slope(penalized_loss)
    if paceline.dist.is_main():
        print(f"largest slope without and with the penalty: {free:.2f} -> {penalized:.2f}")


if __name__ == "__main__":
    main()
