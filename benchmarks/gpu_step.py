"""Cost of a step of a tiny model on a GPU, which waits for the CPU: the Trainer compared with a hand-written loop.

    python benchmarks/gpu_step.py [--rounds 7] [--steps 100] [--seconds 30]
    python benchmarks/gpu_step.py --batches gpu --optimizers sgd --kernels     the kernels and calls that differ
    python benchmarks/gpu_step.py --device cpu

Batches are in pageable memory, in pinned memory or on the GPU already. Both loops use the same optimizer and end with
the same weights; in `adamw, built` the Trainer builds its own from {"name": "adamw"}, and raw has torch's defaults. All
cases are interleaved in one process. Times are the medians of single steps on the CPU, from the request of a batch to
the next one, which a preemption of some of them does not change; `whole` is the ratio of the times of whole rounds,
with synchronization with the GPU at both ends, which shows a queue that fills. A second table counts, per step, the
kernels and copies on the GPU (torch.profiler) and the calls of Python functions on the CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice, pairwise
from operator import itemgetter, truediv
from pathlib import Path
from typing import Any, NamedTuple

import torch
from overhead import LR, WARM_UP, Batches, interleaved, paceline_idle, run, tiny_batches, tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

COUNTED = 20  # steps over which kernels and calls are counted
BUILT = "adamw, built"
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=LR),
    "adamw, fused": lambda model: AdamW(model.parameters(), lr=LR, fused=True),
    "adamw": lambda model: AdamW(model.parameters(), lr=LR),
    BUILT: lambda model: AdamW(model.parameters(), lr=LR),
}
PLACES = ("pageable", "pinned", "gpu")
Pair = tuple[Tensor, Tensor]
Measured = dict["Case", dict[str, list["Round"]]]  # by case, loop and round


class Case(NamedTuple):
    place: str  # where the batches are
    optimizer: str
    device: torch.device


class Counts(NamedTuple):
    """Per step."""

    kernels: float
    copies: float  # between CPU and GPU, or on the GPU
    calls: float  # of Python functions
    names: dict[str, float]  # kernels, copies, calls of the CUDA API and of Python functions


class Round(NamedTuple):
    """µs of a step."""

    typical: float
    mean: float


class Timed(Batches):
    """Ready batches whose clock waits for the GPU; `between` runs when the counted steps begin and end."""

    def __init__(self, different: list[Pair], steps: int, between: Callable[[bool], None] | None = None) -> None:
        super().__init__(different, steps)
        self._between = between
        self._requests: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        items = list.__iter__(self)
        # Without a call of Python code: `map` appends the time of every request.
        clock = map(self._requests.append, iter(time.perf_counter, None))
        counted = map(itemgetter(0), zip(islice(items, self._steps), clock, strict=False))
        return chain(islice(items, WARM_UP), self._start(), counted, self._stop(), items)

    def round(self) -> Round:
        steps = [end - start for start, end in pairwise(self._requests)]
        return Round(statistics.median(steps) * 1e6, self.seconds / self._steps * 1e6)

    def _start(self) -> Iterator[Any]:
        self._synchronize()
        if self._between is not None:
            self._between(True)
        self._started = time.perf_counter()
        yield from ()

    def _stop(self) -> Iterator[Any]:
        self._synchronize()
        self.seconds = time.perf_counter() - self._started
        if self._between is not None:
            self._between(False)
        yield from ()

    def _synchronize(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def raw(case: Case, model: nn.Module, batches: Batches) -> None:
    optimizer, device = OPTIMIZERS[case.optimizer](model), case.device
    moves = device.type == "cuda" and case.place != "gpu"
    for inputs, targets in batches:
        if moves:
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def trainer(case: Case, model: nn.Module, batches: Batches) -> None:
    built = {"name": "adamw", "lr": LR} if case.optimizer == BUILT else OPTIMIZERS[case.optimizer](model)
    paceline_idle(model, batches, optimizer=built, device=case.device)


LOOPS: dict[str, Callable[[Case, nn.Module, Batches], None]] = {"raw": raw, "paceline": trainer}


def placed(case: Case) -> list[Pair]:
    pairs = tiny_batches()
    if case.place == "pinned":
        return [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in pairs]
    if case.place == "gpu":
        return [(inputs.to(case.device), targets.to(case.device)) for inputs, targets in pairs]
    return pairs


def train(case: Case, loop: str, batches: Batches) -> Tensor:
    """The final weights."""
    return run(partial(LOOPS[loop], case), tiny_model().to(case.device), batches)


def measure_round(case: Case, loop: str, different: list[Pair], steps: int) -> Round:
    train(case, loop, batches := Timed(different, steps))
    return batches.round()


def measure(cases: list[Case], rounds: int, steps: int, seconds: float = math.inf) -> Measured:
    runs = {}
    for case in cases:
        different = placed(case)
        raw, ours = (train(case, loop, Timed(different, COUNTED)) for loop in LOOPS)
        if case.optimizer != BUILT and not torch.equal(raw, ours):
            print(f"Weights differ by up to {(raw - ours).abs().max():.1e}: {case.place}, {case.optimizer}")
        runs |= {f"{case}{loop}": partial(measure_round, case, loop, different, steps) for loop in LOOPS}
    times = interleaved(runs, rounds, seconds)
    return {case: {loop: times[f"{case}{loop}"] for loop in LOOPS} for case in cases}


def count(case: Case, loop: str) -> Counts:
    different, names = placed(case), Counter[str]()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names[f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}"] += 1

    train(case, loop, Timed(different, COUNTED, lambda begins: sys.setprofile(note if begins else None)))
    calls = names.total() // COUNTED  # without the few of the clock
    kernels = copies = 0
    if case.device.type == "cuda":
        profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)  # or torch warns that it clears events
        train(case, loop, Timed(different, COUNTED, lambda begins: profiler.start() if begins else profiler.stop()))
        for event in profiler.events() or ():
            if getattr(event, "is_user_annotation", False) or event.name.startswith(("Optimizer.", "ProfilerStep")):
                continue
            names[event.name] += 1
            if event.device_type == torch.autograd.DeviceType.CUDA:
                copies += event.name.startswith(("Memcpy", "Memset"))
                kernels += not event.name.startswith(("Memcpy", "Memset"))
    return Counts(kernels / COUNTED, copies / COUNTED, calls, {name: n / COUNTED for name, n in names.items()})


def print_times(measured: Measured) -> None:
    columns = ("raw, best µs", "raw, median", "paceline, best µs", "paceline, median", "ratio, best", "paired", "whole")
    print(f"| batches | optimizer | {' | '.join(columns)} |\n{'|---' * 9}|")
    for case, rounds in measured.items():
        typical = {loop: [each.typical for each in rounds[loop]] for loop in LOOPS}
        cells = [f"{figure(values):.0f}" for values in typical.values() for figure in (min, statistics.median)]
        whole = min(each.mean for each in rounds["paceline"]) / min(each.mean for each in rounds["raw"])
        ratios = (min(typical["paceline"]) / min(typical["raw"]), paired(typical), whole)
        cells += [f"{ratio:.3f}" for ratio in ratios]
        print(f"| {case.place} | {case.optimizer} | {' | '.join(cells)} |")
    print(flush=True)


def paired(typical: dict[str, list[float]]) -> float:
    return statistics.median(map(truediv, typical["paceline"], typical["raw"]))


def print_counts(cases: list[Case], *, kernels: bool) -> None:
    print("| batches | optimizer | kernels, raw | paceline | copies, raw | paceline | Python calls, raw | paceline |")
    print("|---" * 8 + "|")
    for case in cases:
        raw, ours = (count(case, loop) for loop in LOOPS)
        cells = [f"{number:g}" for pair in zip(raw[:3], ours[:3], strict=True) for number in pair]
        print(f"| {case.place} | {case.optimizer} | {' | '.join(cells)} |", flush=True)
        if kernels:
            for name in sorted(raw.names.keys() | ours.names.keys()):
                if (before := raw.names.get(name, 0)) != (after := ours.names.get(name, 0)):
                    print(f"    {before:5g} → {after:5g}  {name[:150]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--seconds", type=float, default=30.0, help="no round begins later")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batches", nargs="*", default=PLACES, choices=PLACES)
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--kernels", action="store_true", help="list what one loop calls more often than the other")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("There is no GPU. Run it with --device cpu.")
    torch.set_num_threads(1)
    device = torch.device(options.device)
    places = options.batches if device.type == "cuda" else ["pageable"]
    cases = [Case(place, optimizer, device) for optimizer in options.optimizers for place in places]
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    measured = measure(cases, options.rounds, options.steps, options.seconds)
    rounds = len(next(iter(measured.values()))["raw"])
    print(f"{name}, torch {torch.__version__}; {rounds} rounds of {options.steps} steps, interleaved; ", end="")
    print(f"load {os.getloadavg()[0]:.1f}\n", flush=True)
    print_times(measured)
    print_counts(cases, kernels=options.kernels)


if __name__ == "__main__":
    main()
