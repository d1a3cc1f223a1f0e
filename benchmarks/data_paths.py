"""Overhead of each way to pass data, compared with a hand-written loop over the same data: µs and calls per step.

    python benchmarks/data_paths.py [--rounds 15] [--steps 300] [--only generator]

A tiny model on the CPU, one thread. Both loops must end with the same weights. Rounds are interleaved, and only the
steps after the warm-up count. `best` is the difference of the fastest rounds, `paired` the median of the differences
within a round.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from overhead import COUNTED, WARM_UP, interleaved, sgd, tiny_batches, tiny_model
from overhead import by_hand as train_by_hand
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import paceline

SAMPLES = 16  # in a batch


class OwnDataset(Dataset[Any]):
    """A dataset that may draw random numbers, as far as a library can tell."""

    def __init__(self, steps: int) -> None:
        self._inputs, self._targets = _tensors(steps)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]


class Stream(IterableDataset[Any]):
    def __init__(self, steps: int) -> None:
        self._samples = list(zip(*_tensors(steps), strict=True))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


class Iterable:
    """Ready batches, but not in a list."""

    def __init__(self, steps: int) -> None:
        self._batches = _batches(steps)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _batches(steps: int) -> list[Any]:
    return list(islice(cycle(tiny_batches()), steps))


def _tensors(steps: int) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*_batches(steps), strict=True)
    return torch.cat(inputs), torch.cat(targets)


# The data of a run of so many steps.
KINDS: dict[str, Callable[[int], Any]] = {
    "list of batches": _batches,
    "iterable of batches": Iterable,
    "generator of batches": lambda steps: iter(_batches(steps)),
    "DataLoader, IterableDataset": lambda steps: DataLoader(Stream(steps), SAMPLES),
    "DataLoader, TensorDataset": lambda steps: DataLoader(TensorDataset(*_tensors(steps)), SAMPLES),
    "DataLoader, own Dataset": lambda steps: DataLoader(OwnDataset(steps), SAMPLES),
}


def by_hand(model: nn.Module, data: Any, steps: int) -> None:
    train_by_hand(model, sgd(model), islice(data, steps))


def by_trainer(model: nn.Module, data: Any, steps: int) -> None:
    idle: dict[str, Any] = {"criterion": cross_entropy, "quiet": True, "run": False, "log_every": steps + 1}
    paceline.Trainer(model, sgd(model), **idle).train(data, max_steps=steps)


Loop = Callable[[nn.Module, Any, int], None]


def measure(kind: str, loop: Loop, steps: int, profile: Callable[..., None] | None = None) -> tuple[float, Tensor]:
    """Seconds for `steps` steps, from forward to forward, and the final weights."""
    model, started, seconds = tiny_model(), 0.0, 0.0
    ends = iter([*[""] * WARM_UP, "start", *[""] * (steps - 1), "stop"])

    def clock(module: nn.Module, inputs: Any) -> None:
        nonlocal started, seconds
        match next(ends, ""):
            case "start":
                sys.setprofile(profile)
                started = time.perf_counter()
            case "stop":
                seconds = time.perf_counter() - started
                sys.setprofile(None)

    model.register_forward_pre_hook(clock)
    needed = WARM_UP + steps + 1
    data = KINDS[kind](needed)
    gc.collect()
    loop(model, data, needed)
    return seconds, nn.utils.parameters_to_vector(model.parameters()).detach()


def calls_a_step(kind: str, loop: Loop) -> float:
    """Calls of Python functions."""
    events: Counter[str] = Counter()
    measure(kind, loop, COUNTED, lambda frame, event, argument: events.update((event,)))
    return events["call"] / COUNTED


def rows(steps: int = 300) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """For each kind of data: µs per step of a hand-written loop, and of the Trainer."""

    def microseconds(kind: str, loop: Loop) -> float:
        return measure(kind, loop, steps)[0] / steps * 1e6

    return {kind: (partial(microseconds, kind, by_hand), partial(microseconds, kind, by_trainer)) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300, help="steps per round")
    parser.add_argument("--only", default="", help="kinds of data whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.rounds} rounds of {options.steps} steps, interleaved; load {os.getloadavg()[0]:.1f}\n")
    print("| data | by hand, µs | Trainer, µs | over raw, best | over raw, paired | more Python calls |")
    print("|---" * 6 + "|")
    for kind, (raw, ours) in rows(options.steps).items():
        if options.only not in kind:
            continue
        weights = [measure(kind, loop, COUNTED)[1] for loop in (by_hand, by_trainer)]
        assert torch.equal(*weights), "not the same work"
        times = interleaved({"raw": raw, "ours": ours}, options.rounds)
        pairs = zip(times["ours"], times["raw"], strict=True)
        best, paired = [min(times[each]) for each in times], statistics.median(mine - theirs for mine, theirs in pairs)
        more = calls_a_step(kind, by_trainer) - calls_a_step(kind, by_hand)
        print(f"| {kind} | {best[0]:.0f} | {best[1]:.0f} | {best[1] - best[0]:+.0f} | {paired:+.0f} | {more:+.0f} |")


if __name__ == "__main__":
    main()
