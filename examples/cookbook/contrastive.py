"""A contrastive loss over the samples of all ranks: every pair of the global batch is a negative.

paceline launch -n 2 examples/cookbook/contrastive.py

Such a loss is not a mean over samples: computed on each rank for itself, it would compare with fewer negatives, the
more ranks there are. `paceline.dist.all_gather_rows` returns the features of all ranks, in the order of the batch, and
gradients flow back through it. This rank's rows are then compared with everyone's. The pre-flight notices that, and
does not compare the loss with that of slices. With `accumulate` it warns: then only the rows of a micro-batch are
compared.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import Dataset

import paceline


class Views(Dataset):
    """Two noisy views of the same point. The noise is drawn by sample, so it is the same on any number of ranks."""

    def __init__(self, points):
        self.points = points

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point + 0.1 * torch.randn_like(point), point + 0.1 * torch.randn_like(point)


def contrastive_loss(model, batch, temperature=0.1):
    one, two = (normalize(model(view), dim=1) for view in batch)
    everyone = paceline.dist.all_gather_rows(two)
    before = sum(paceline.dist.all_gather_object(len(one))[: paceline.dist.rank()])  # rows of the ranks before this one
    logits = one @ everyone.T / temperature
    return cross_entropy(logits, torch.arange(before, before + len(one), device=one.device))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    torch.manual_seed(0)
    data = Views(torch.randn(256, 8))
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 16))
    # One micro-batch per step: with accumulation, only the samples of one micro-batch are compared with each other.
    trainer = paceline.Trainer(model, {"lr": 3e-3}, loss_fn=contrastive_loss, batch=64, strategy="ddp", run=False)
    history = trainer.train(data, max_steps=args.steps)
    if trainer.is_main_process:
        print(f"loss {history.losses[0]:.4f} -> {history.losses[-1]:.4f} (64 candidates per sample, on any ranks)")


if __name__ == "__main__":
    main()
