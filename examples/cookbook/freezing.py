"""Train a new head on a frozen backbone first, then unfreeze the backbone with a smaller learning rate.

paceline launch -n 2 examples/cookbook/freezing.py

Layers may be frozen and unfrozen between steps, on every rank, in every layout; DDP is rebuilt for the new set.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class Unfreeze:
    """A callback: train `layer` from an epoch on. Callbacks run on every rank."""

    def __init__(self, layer, epoch):
        self.layer, self.epoch = layer, epoch

    def on_epoch(self, record):  # after each epoch, which are counted from 0
        if record.epoch + 1 == self.epoch:
            self.layer.requires_grad_(True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    data = TensorDataset(inputs, (inputs.prod(1) > 0).long())
    backbone = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    model = nn.Sequential(backbone, nn.Linear(64, 2))
    backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": backbone.parameters(), "lr": 1e-3}, {"params": model[1].parameters(), "lr": 1e-2}], weight_decay=0.0
    )  # all parameters, also the frozen ones: those without a gradient are left as they are

    first = [parameter.detach().clone() for parameter in backbone.parameters()]
    trainer = paceline.Trainer(
        model,
        optimizer,
        criterion=nn.CrossEntropyLoss(),
        batch=64,
        callbacks=[Unfreeze(backbone, epoch=args.epochs // 2)],
        run=False,
    )

    def change():
        with torch.no_grad():
            pairs = zip(backbone.parameters(), first, strict=True)
            return max((new.cpu() - old).abs().max().item() for new, old in pairs)

    trainer.train(data, epochs=args.epochs // 2)
    while_frozen = change()
    history = trainer.train(data, epochs=args.epochs)  # epochs count from the beginning of the run
    if trainer.is_main_process:
        print(f"change of the backbone {while_frozen:.3f} -> {change():.3f}; loss {history.losses[-1]:.3f}")


if __name__ == "__main__":
    main()
