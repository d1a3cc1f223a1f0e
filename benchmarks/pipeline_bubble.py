"""Pipeline bubble: measured, and by the formula of each schedule (plan/partition.py).

    python benchmarks/pipeline_bubble.py [--ranks 4] [--microbatches 8] [--milliseconds 40]

Stages only sleep: 40 ms in a forward pass, 40 ms for the gradient of their input and 40 ms for that of their weight.
Any machine can run it, regardless of its cores, and the difference to the ideal time is due to the schedule. It fails
if gpipe, 1f1b or interleaved are more than 5 points off; zero-bubble is only shown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.config.sections import PipelineSection
from paceline.plan.partition import bubble, stages_per_rank

WIDTH = 4
ALLOWED = 0.05


class Pass(torch.autograd.Function):
    """Sleeps in the forward pass, and for the gradient of the activations."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Weigh(torch.autograd.Function):
    """Sleeps for the gradient of the weight, which zero-bubble computes separately from that of the input."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds = seconds

    def forward(self, inputs: Tensor) -> Tensor:
        # The inputs of the first stage need no gradient; it sleeps anyway, as the formulas assume.
        inputs = inputs.requires_grad_() if inputs.is_leaf and torch.is_grad_enabled() else inputs
        way: Tensor = Pass.apply(inputs, self.seconds)
        weight: Tensor = Weigh.apply(self.weight, self.seconds)
        return way + weight


def measure(schedules: list[str], microbatches: int, seconds: float, steps: int) -> dict[str, float]:
    """Idle fraction of the median step, by schedule."""
    found = {}
    for schedule in schedules:
        settings = {"schedule": schedule, "microbatches": microbatches}
        stages = stages_per_rank(PipelineSection(schedule=schedule))  # type: ignore[arg-type]
        trainer = paceline.Trainer(
            nn.Sequential(*(Sleeper(seconds) for _ in range(stages * paceline.dist.world()))),
            {"name": "sgd", "lr": 0.1},
            criterion=nn.MSELoss(),
            strategy="pp",
            pipeline=settings,
            batch=microbatches,
            run=False,
            quiet=True,
        )
        samples = torch.zeros((steps + 1) * microbatches, WIDTH)
        data = TensorDataset(samples, samples + 1)
        times = []
        for number, batch in enumerate(trainer.loader(data)):
            paceline.dist.barrier()
            began = time.perf_counter()
            trainer.training_step(batch)
            paceline.dist.barrier()  # a step ends when its last rank ends
            if number:  # the first one includes the pre-flight
                times.append(time.perf_counter() - began)
        found[schedule] = 1.0 - 3 * seconds * stages * microbatches / statistics.median(times)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=40.0)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    schedules = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
    measured = paceline.launch(
        measure, ranks=args.ranks, schedules=schedules, microbatches=args.microbatches,
        seconds=args.milliseconds / 1000, steps=args.steps,
    )  # fmt: skip
    each = f"{args.milliseconds:g} + 2 × {args.milliseconds:g} ms"
    print(f"{args.ranks} ranks, {args.microbatches} micro-batches, stages of {each}")
    print(f"{'schedule':<12} {'stages':>6} {'formula':>8} {'measured':>9} {'points off':>11}")
    failed = False
    for schedule in schedules:
        stages = stages_per_rank(PipelineSection(schedule=schedule))  # type: ignore[arg-type]
        expected = bubble(schedule, args.ranks, stages, args.microbatches)
        off = measured[schedule] - expected
        print(f"{schedule:<12} {stages:>6} {expected:>8.1%} {measured[schedule]:>9.1%} {100 * off:>+11.1f}")
        failed |= schedule != "zero-bubble" and abs(off) > ALLOWED
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
