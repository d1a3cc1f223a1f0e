"""Loss after equal samples: plain DDP, torch's hooks and the compressions of `sync`, on two ranks.

    python benchmarks/compression_loss.py [--steps 400]

A network with two hidden layers learns another one of the same size. All begin with the same weights and see the same
samples; `ratio` is the loss on held-out samples divided by that of plain DDP, for the mean over the seeds.
"""

from __future__ import annotations

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from compression_cost import Hook, ours, torch_fp16, torch_powersgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline

SEEDS = (0, 1, 2)
METHODS: dict[str, Hook | None] = {
    "plain DDP": None,
    "torch fp16": torch_fp16,
    "fp16": partial(ours, compress="fp16"),
    "bf16": partial(ours, compress="bf16"),
    "int8": partial(ours, compress="int8"),
    **{f"torch powersgd {rank}": partial(torch_powersgd, rank=rank) for rank in (1, 2)},
    **{f"powersgd {rank}": partial(ours, compress="powersgd", rank=rank) for rank in (1, 2)},
}


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 16))


def loss_of(model: nn.Module, teacher: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        targets = 4 * teacher(inputs)
    return nn.functional.mse_loss(model(inputs), targets)


def train(hook: Hook | None, seed: int, steps: int) -> float:
    model, teacher = network(seed), network(100 + seed)
    # One bucket: on gloo, torch's PowerSGD mixes up the messages of several.
    ddp = DistributedDataParallel(model, bucket_cap_mb=1000, gradient_as_bucket_view=True)
    if hook is not None:
        hook(ddp, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(ddp, teacher, torch.randn(32, 64, generator=generator)).backward()
        optimizer.step()
    held_out = torch.randn(2048, 64, generator=torch.Generator().manual_seed(7))
    return loss_of(model, teacher, held_out).item()


def measure(steps: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    losses = {name: [train(hook, seed, steps) for seed in SEEDS] for name, hook in METHODS.items()}
    dist.destroy_process_group()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    losses = paceline.launch(measure, ranks=2, steps=steps)
    print(f"{steps} steps, 2 ranks, seeds {SEEDS}; {os.cpu_count()} cores\n")
    print("| method | loss | ratio |\n|---|---|---|")
    plain = sum(losses["plain DDP"])
    for name, values in losses.items():
        print(f"| {name} | {sum(values) / len(values):.4f} | {sum(values) / plain:.3f} |")


if __name__ == "__main__":
    main()
