"""A loop of your own: the Trainer takes care of ranks, precision, accumulation and clipping; the loop is yours.

python examples/own_loop.py
paceline launch -n 2 examples/own_loop.py --epochs 5

`trainer.loader` yields the micro-batches of this rank, and `trainer.training_step` steps the optimizer after the last
one of a step. With `forward`, `backward` and `step` instead, the parts can be called one by one.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512)
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(args.samples, 8)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = paceline.Trainer(
        model, optimizer, criterion=nn.MSELoss(), batch=64, accumulate=2, clip_norm=1.0, precision="bf16"
    )

    means = []
    for _ in range(trainer.epoch, args.epochs):
        total = torch.zeros(2, device=trainer.world.device)  # the sum of losses, and the number of samples
        for batch in trainer.loader(data):
            loss, stepped = trainer.training_step(batch)
            total += torch.stack([loss * len(batch[0]), torch.tensor(float(len(batch[0])), device=total.device)])
            if stepped:
                trainer.log("largest_input", batch[0].abs().max())  # the mean over ranks is in metrics.jsonl
        paceline.dist.all_reduce(total)  # once per epoch; the loss of a batch stays on its rank
        means.append((total[0] / total[1]).item())
        if trainer.is_main_process:
            print(f"epoch {len(means)}: loss {means[-1]:.4f} after {trainer.step_count} steps")

    result = trainer.evaluate(data)  # on every rank, over all samples
    if trainer.is_main_process:
        print(f"loss {means[0]:.4f} -> {result['loss']:.4f}")


if __name__ == "__main__":
    main()
