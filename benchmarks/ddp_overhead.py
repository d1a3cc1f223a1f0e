"""Overhead of the Trainer on two ranks, compared with a hand-written DDP loop in the same processes.

    python benchmarks/ddp_overhead.py [--rounds 15]

Both get the same list of global batches, of which each rank takes its half, and both must end with the same weights.
The hand-written loop always uses the plain mean, as does the Trainer with the tiny and the large model; in the third
case its loss has a data-dependent weight, which must be summed over the ranks in every step. Speed is the time of the
hand-written loop divided by that of the Trainer: 1.00 is equal, less is slower. `best` compares the fastest rounds,
`paired` is the median of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from overhead import (
    Batches,
    Loop,
    by_hand,
    interleaved,
    microseconds_a_step,
    paceline_idle,
    run,
    sgd,
    tiny_batches,
    tiny_model,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import paceline

RANKS = 2
WIDTH, ROWS = 1024, 768  # of the large model: about 50 ms per step on one core


@dataclass(frozen=True)
class Case:
    name: str
    goal: float
    steps: int  # in each round
    model: Callable[[], nn.Module]
    batches: Callable[[], list[tuple[Tensor, Tensor]]]
    settings: dict[str, Any]  # of the Trainer


def large_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def large_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(ROWS, 32), torch.randint(10, (ROWS,))) for _ in range(5)]


def weighted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> paceline.Loss:
    inputs, targets = batch
    return paceline.Loss(cross_entropy(model(inputs), targets, reduction="sum"), (targets >= 0).sum())


CASES = (
    Case("tiny model, mean", 0.98, 150, tiny_model, tiny_batches, {}),
    Case("50 ms step, mean", 0.98, 20, large_model, large_batches, {}),
    Case("tiny model, weighted", 0.92, 150, tiny_model, tiny_batches, {"criterion": None, "loss_fn": weighted_loss}),
)


def ddp_by_hand(model: nn.Module, batches: Batches) -> None:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    by_hand(wrapped, sgd(model), own_half(batches))


def own_half(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    half = len(batches[0][0]) // RANKS
    start, stop = dist.get_rank() * half, (dist.get_rank() + 1) * half
    for inputs, targets in batches:
        yield inputs[start:stop], targets[start:stop]


def measure(rounds: int, only: Sequence[str] = ()) -> list[dict[str, list[float]]]:
    """On every rank: µs per step by case and loop. `only`: names of cases; none: all of them."""
    dist.init_process_group("gloo")
    results = []
    for case in [case for case in CASES if not only or case.name in only]:
        loops: dict[str, Loop] = {"by hand": ddp_by_hand, "paceline": partial(paceline_idle, **case.settings)}
        expected, got = (run(loop, case.model(), Batches(case.batches(), 10)) for loop in loops.values())
        torch.testing.assert_close(got, expected, msg=f"{case.name}: not the same work")
        time = partial(microseconds_a_step, make_model=case.model, different=case.batches(), steps=case.steps)
        results.append(interleaved({name: partial(time, loop) for name, loop in loops.items()}, rounds))
    dist.destroy_process_group()
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=31)
    rounds = parser.parse_args().rounds
    import paceline.train.trainer  # import once, before ranks are forked

    results = paceline.launch(measure, ranks=RANKS, rounds=rounds)
    print(f"{rounds} rounds, interleaved, {RANKS} ranks on {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}\n")
    print("| case | by hand, best µs | paceline, best µs | speed, best | speed, paired | goal |")
    print("|---" * 6 + "|")
    for case, times in zip(CASES, results, strict=True):
        hand, ours = times["by hand"], times["paceline"]
        paired = statistics.median(theirs / mine for theirs, mine in zip(hand, ours, strict=True))
        print(f"| {case.name} | {min(hand):.0f} | {min(ours):.0f} | {min(hand) / min(ours):.2f} |", end="")
        print(f" {paired:.2f} | ≥ {case.goal} |")


if __name__ == "__main__":
    main()
