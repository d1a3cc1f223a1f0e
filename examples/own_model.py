"""A custom model and dataset, on any number of ranks.

python examples/own_model.py
paceline launch -n 2 examples/own_model.py --epochs 5
"""

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline


class Waves(Dataset):
    """Points on a sine curve, with per-sample noise."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        x = torch.tensor([index / 512 * 6.28])
        return x, torch.sin(x) + 0.05 * torch.randn(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = paceline.Trainer(model, optimizer, criterion=nn.MSELoss(), batch=64)
    history = trainer.train(Waves(), epochs=args.epochs)
    if trainer.is_main_process:
        print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}")


if __name__ == "__main__":
    main()
