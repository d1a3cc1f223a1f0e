"""What the Trainer costs on every path, compared with a hand-written loop: one table, with the bound of each row.

    python benchmarks/cost_table.py [--rounds 15] [--only "AdamW,DDP"]

Each row is one interleaved run of a benchmark in this folder, which says more about it when it is run by itself.
Figures are those of the fastest rounds, and in parentheses the median of the pairs; whether a bound is met is decided
by the former. Rounds on one rank are medians of single steps, which other load hardly changes. Rows that need a GPU are
skipped without one.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from key_figures import step_times
from overhead import ADAMW_LOOPS, WARM_UP, Batches, interleaved, tiny_batches

import paceline

Times = tuple[Sequence[float], Sequence[float]]  # µs per step by round: of the hand-written loop, and of the Trainer


@dataclass(frozen=True)
class Options:
    rounds: int
    steps: int
    seconds: float  # no round of a row begins later
    saves: int


@dataclass(frozen=True)
class Result:
    """The cells of a row, and whether its bound is met."""

    raw: str
    ours: str
    figure: str
    is_met: bool


@dataclass(frozen=True)
class Bound:
    """Of the difference of two times, of their ratio, or of the ratio of two speeds."""

    limit: float
    of: Literal["difference", "time", "speed"]

    def __str__(self) -> str:
        return {
            "difference": f"≤ {self.limit:+g} µs",
            "time": f"≤ {self.limit:g} × the time",
            "speed": f"≥ {self.limit:g} × the speed",
        }[self.of]

    def compare(self, raw: float, ours: float) -> float:
        return {"difference": ours - raw, "time": ours / raw, "speed": raw / ours}[self.of]

    def judge(self, raw: Sequence[float], ours: Sequence[float]) -> Result:
        """From the µs per step of interleaved rounds."""
        best = self.compare(min(raw), min(ours))
        paired = statistics.median(map(self.compare, raw, ours))
        figure = f"{best:+.0f} µs ({paired:+.0f})" if self.of == "difference" else f"{best:.2f} × ({paired:.2f})"
        is_met = best >= self.limit if self.of == "speed" else best <= self.limit
        return Result(f"{min(raw):.0f} µs", f"{min(ours):.0f} µs", figure, is_met)


@dataclass(frozen=True)
class Row:
    path: str
    bound: Bound | str
    measure: Callable[[Options], Any]  # Times for a `Bound`, or a Result
    on_gpu: bool = False


def data_path(kind: str, options: Options) -> Times:
    import data_paths

    needed = WARM_UP + options.steps + 1

    def train(model: Any, loop: data_paths.Loop) -> None:
        loop(model, data_paths.KINDS[kind](needed), needed)

    loops = [partial(train, loop=loop) for loop in (data_paths.by_hand, data_paths.by_trainer)]
    raw, ours = step_times(loops, options.rounds, options.seconds)
    return raw, ours


def weighted_ddp(options: Options) -> Times:
    import ddp_overhead

    [times] = paceline.launch(
        ddp_overhead.measure, ranks=ddp_overhead.RANKS, rounds=2 * options.rounds + 1, only=["tiny model, weighted"]
    )
    return times["by hand"], times["paceline"]


def adamw(options: Options) -> Times:
    batches = Batches(tiny_batches(), options.steps)
    raw, ours = step_times(
        [partial(loop, batches=batches) for loop in ADAMW_LOOPS.values()], options.rounds, options.seconds
    )
    return raw, ours


def gpu_step(place: str, options: Options) -> Times:
    import gpu_step

    case = gpu_step.Case(place, "adamw, fused", torch.device("cuda"))
    rounds = gpu_step.measure([case], options.rounds, options.steps, options.seconds)[case]
    return [each.typical for each in rounds["raw"]], [each.typical for each in rounds["paceline"]]


def graphed_step(place: str, options: Options) -> Times:
    import graph_cost

    times = graph_cost.times_of("tiny", place, options.rounds, options.steps, torch.device("cuda"))
    return times["raw"], times["Trainer, graph"]


def checkpoint_stall(options: Options) -> Result:
    """In a process of its own: its clocks replace methods."""
    program = [sys.executable, str(Path(__file__).with_name("save_stalls.py")), "--gpu", "--saves", str(options.saves)]
    done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True)
    found = re.search(r"stall: median (.+?) ms, 99th percentile (.+?) ms", done.stdout)
    assert found, done.stdout
    figure = f"{found[2]} ms at the 99th percentile, median {found[1]} ms"
    return Result("", f"{options.saves} saves", figure, float(found[2]) <= STALL)


def resnet(options: Options) -> Result:
    import resnet_throughput as benchmark

    given = argparse.Namespace(batch=512, size=224, device="cuda", source="gpu")
    kinds = {"raw": benchmark.ByHand, "paceline": benchmark.ByTrainer}
    data, images = benchmark.batches(given), given.batch * (benchmark.STEPS - benchmark.WARM_UP)
    loops = {name: kind(benchmark.resnet50(), given, compiled=True) for name, kind in kinds.items()}
    rounds = interleaved({name: partial(loop.round, data) for name, loop in loops.items()}, 3)
    raw, ours = (images / statistics.median(seconds) for seconds in rounds.values())
    return Result(f"{raw:,.0f} images/s", f"{ours:,.0f} images/s", f"{ours / raw:.2f} × the speed", ours >= IMAGES)


STALL, IMAGES = 10.0, 7000
SAME_TIME, TENTH = Bound(1.03, "time"), Bound(0.1, "time")
ROWS = (
    Row("tiny model, list of batches", Bound(10, "difference"), partial(data_path, "list of batches")),
    Row("any other iterable of batches", Bound(15, "difference"), partial(data_path, "iterable of batches")),
    Row("IterableDataset in a DataLoader", Bound(25, "difference"), partial(data_path, "DataLoader, IterableDataset")),
    Row("map dataset in a DataLoader", Bound(15, "difference"), partial(data_path, "DataLoader, own Dataset")),
    Row("2-rank DDP, data-dependent weight", Bound(0.92, "speed"), weighted_ddp),
    Row("AdamW with defaults", Bound(1.6, "speed"), adamw),
    Row("GPU, tiny model, pageable batches", SAME_TIME, partial(gpu_step, "pageable"), on_gpu=True),
    Row("GPU, tiny model, pinned batches", SAME_TIME, partial(gpu_step, "pinned"), on_gpu=True),
    Row("GPU, tiny model, batches on the GPU", SAME_TIME, partial(gpu_step, "gpu"), on_gpu=True),
    Row("GPU, graph: true, pageable batches", TENTH, partial(graphed_step, "pageable"), on_gpu=True),
    Row("GPU, graph: true, pinned batches", TENTH, partial(graphed_step, "pinned"), on_gpu=True),
    Row("GPU, graph: true, batches on the GPU", TENTH, partial(graphed_step, "gpu"), on_gpu=True),
    Row("GPU, scheduled checkpoint of 3 GB", f"≤ {STALL:g} ms", checkpoint_stall, on_gpu=True),
    Row("GPU, ResNet-50, channels last, bf16, compiled", f"≥ {IMAGES:,} images/s", resnet, on_gpu=True),
)


def print_row(row: Row, options: Options) -> None:
    if row.on_gpu and not torch.cuda.is_available():
        print(f"| {row.path} | | | not measured: there is no GPU | {row.bound} | |", flush=True)
        return
    try:
        found = row.measure(options)
        result = row.bound.judge(*found) if isinstance(row.bound, Bound) else found
    except Exception as error:  # the other rows are still wanted
        traceback.print_exc()
        print(f"| {row.path} | | | failed: {type(error).__name__} | {row.bound} | no |", flush=True)
        return
    met = "yes" if result.is_met else "**no**"
    print(f"| {row.path} | {result.raw} | {result.ours} | {result.figure} | {row.bound} | {met} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300, help="steps per round")
    parser.add_argument("--seconds", type=float, default=30.0, help="no round of a row begins later")
    parser.add_argument("--saves", type=int, default=100, help="of the row about checkpoints")
    parser.add_argument("--only", default="", help="rows whose name contains one of these, separated by commas")
    given = parser.parse_args()
    torch.set_num_threads(1)

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{os.cpu_count()} cores, {machine}, torch {torch.__version__}; ", end="")
    print(f"{given.rounds} rounds of {given.steps} steps, interleaved; load {os.getloadavg()[0]:.1f}\n")
    print(f"| path | raw | paceline | over raw | wanted | met |\n{'|---' * 6}|", flush=True)
    for row in ROWS:
        if any(part in row.path for part in given.only.split(",")):
            print_row(row, Options(given.rounds, given.steps, given.seconds, given.saves))


if __name__ == "__main__":
    main()
