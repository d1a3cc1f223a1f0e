"""Overhead of the Trainer under fsdp, compared with the same FSDP2 calls written by hand in the same two processes.

    python benchmarks/fsdp_overhead.py [--rounds 7] [--width 256] [--rows 128]

Both shard the same blocks, both use fused AdamW (by hand on DTensors, as is usual) and both must end with the same
weights. Speed is the time of the hand-written loop divided by that of the Trainer: 1.00 is equal, less is slower. It is
the median of the ratios of the rounds, and the script fails if it is below the goal. The second table compares settings
of the Trainer with its default: how far ahead blocks are gathered, and whether they stay gathered until the backward.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from overhead import Batches, Loop, interleaved
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

import paceline

RANKS, BLOCKS, LR, GOAL = 2, 6, 1e-3, 0.98
STEPS = 8  # in each round


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


class Stack(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(Block(width) for _ in range(BLOCKS))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def batches_of(rows: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(rows, 32), torch.randint(10, (rows,))) for _ in range(5)]


def by_hand(model: Stack, batches: Batches, clip_norm: float | None) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = AdamW(model.parameters(), lr=LR, fused=True)
    half = len(batches[0][0]) // RANKS
    own = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs[own]), targets[own]).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()


def by_paceline(model: Stack, batches: Batches, clip_norm: float | None, **fsdp: Any) -> None:
    trainer = paceline.Trainer(
        model,
        AdamW(model.parameters(), lr=LR, fused=True),
        strategy="fsdp",
        fsdp=fsdp,
        criterion=cross_entropy,
        batch=len(batches[0][0]),
        clip_norm=clip_norm,
        log_every=len(batches) + 1,
        quiet=True,
        run=False,
    )
    trainer.train(batches, max_steps=len(batches))


def run(loop: Loop, width: int, rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, float]:
    """The local shards of the final weights, and µs per step."""
    gc.collect()
    data = [(inputs.to(dtype), targets) for inputs, targets in batches_of(rows)]
    model, batches = Stack(width).to(dtype), Batches(data, STEPS)
    loop(model, batches)
    pieces = [parameter.to_local().detach().flatten() for parameter in model.parameters()]
    return torch.cat(pieces), batches.seconds / STEPS * 1e6


def measure(rounds: int, width: int, rows: int) -> list[dict[str, list[float]]]:
    """On every rank: µs per step by loop, without clipping, with clipping, and with settings of the Trainer."""
    dist.init_process_group("gloo")
    cases: list[dict[str, Loop]] = [
        {"by hand": partial(by_hand, clip_norm=clip), "paceline": partial(by_paceline, clip_norm=clip)}
        for clip in (None, 0.1)
    ]
    settings: dict[str, dict[str, Any]] = {
        "default": {},
        "prefetch: 2": {"prefetch": 2},
        "reshard: false": {"reshard": False},
    }
    cases.append({name: partial(by_paceline, clip_norm=None, **fsdp) for name, fsdp in settings.items()})
    results = []
    for loops in cases:
        # In float64: in float32 AdamW normalizes gradients that are only rounding errors.
        weights = {name: run(loop, width, rows, torch.float64)[0] for name, loop in loops.items()}
        first = next(iter(weights.values()))
        for name, other in weights.items():
            apart = float((other - first).norm() / first.norm())
            assert apart < 1e-9, f"{name}: not the same work, {apart:.1e} apart"
        results.append(interleaved({name: partial(_time, loop, width, rows) for name, loop in loops.items()}, rounds))
    dist.destroy_process_group()
    return results


def _time(loop: Loop, width: int, rows: int) -> float:
    return run(loop, width, rows)[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args()
    import paceline.train.trainer  # import once, before ranks are forked

    *against, own = paceline.launch(measure, ranks=RANKS, **vars(options))
    print(f"{options.rounds} rounds, {RANKS} ranks on {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}\n")
    print("| | by hand, median ms | paceline, median ms | speed | goal |\n" + "|---" * 5 + "|")
    reached = True
    for name, times in zip(("no clipping", "clip_norm"), against, strict=True):
        hand, ours = times["by hand"], times["paceline"]
        speed = statistics.median(theirs / mine for theirs, mine in zip(hand, ours, strict=True))
        reached &= speed >= GOAL
        medians = [f"{statistics.median(values) / 1e3:.1f}" for values in (hand, ours)]
        print(f"| {name} | {' | '.join(medians)} | {speed:.3f} | ≥ {GOAL} |")
    print("\n| fsdp: | median ms | speed relative to the default |\n" + "|---" * 3 + "|")
    for name, values in own.items():
        ratio = statistics.median(default / mine for default, mine in zip(own["default"], values, strict=True))
        print(f"| {name} | {statistics.median(values) / 1e3:.1f} | {ratio:.3f} |")
    sys.exit(not reached)


if __name__ == "__main__":
    main()
