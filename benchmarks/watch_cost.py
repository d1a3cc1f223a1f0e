"""What it costs to be watched for hangs: "Cost" of docs/reliability.md.

Medians of rounds with and without the thread that writes the page of a rank (diagnose/hang/rank_monitor.py), which take
turns, on 2 ranks of this machine.

    python benchmarks/watch_cost.py
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as torch_dist
from torch import nn

import paceline
from paceline import dist
from paceline.diagnose.hang import rank_monitor
from paceline.runtime import environment

ROUNDS, SECONDS = 25, 0.4


def measure() -> list[str]:
    dist.barrier()
    number = torch.ones(1)
    model, inputs = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.ones(16, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    work = {"all_reduce of one number": lambda: torch_dist.all_reduce(number), "step without a collective": step}
    return [f"| {name} | {compare(call)}" for name, call in work.items()]


def compare(call: Callable[[], object]) -> str:
    logs = environment.log_folder()
    assert logs is not None
    took: dict[bool, list[float]] = {True: [], False: []}
    rank_monitor.abandon()
    for number in range(2 * ROUNDS):
        watch = rank_monitor.start(logs.page(dist.rank()), logs.heartbeat(dist.rank())) if number % 2 else None
        took[watch is not None].append(timed(call))
        if watch is not None:
            watch.stop()
    ratios = sorted(watched / alone for watched, alone in zip(took[True], took[False], strict=True))
    quarter = len(ratios) // 4
    return (
        f"{median(took[False]):.1f} µs | {median(took[True]):.1f} µs | {median(ratios):.3f} "
        f"({ratios[quarter]:.3f} to {ratios[-quarter]:.3f}) |"
    )


def timed(call: Callable[[], object]) -> float:
    """Microseconds of a call. All ranks make as many."""
    calls = 200
    for _ in range(20):
        call()
    torch_dist.barrier()
    total, began = 0, time.perf_counter()
    while True:
        for _ in range(calls):
            call()
        total += calls
        elapsed = torch.tensor(time.perf_counter() - began)
        torch_dist.all_reduce(elapsed, torch_dist.ReduceOp.MAX)
        if elapsed.item() > SECONDS:
            return (time.perf_counter() - began) / total * 1e6


if __name__ == "__main__":
    print("| | alone | watched | ratio (middle half) |\n|---|---|---|---|")
    print(*paceline.launch(measure, ranks=2), sep="\n")
