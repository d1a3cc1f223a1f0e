"""Bucket sizes of DDP over a slow network: `ddp: {bucket_mb: auto}` compared with fixed sizes.

    python benchmarks/bucket_sizes.py [--rounds 3] [--steps 8]

Needs root: two ranks train in two network namespaces, joined by a link of 1 Gb/s, and then of 200 Mb/s (slow_link.py).
Every round trains with each size in turn, from the same weights on the same batches. Times are milliseconds of a step
of rank 0, without the first two of a training: the median over all rounds and, in parentheses, the fastest. `auto`
measures anew in every round; its choices are listed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from slow_link import limit_rate, on_both, two_machines
from torch.utils.data import default_collate

import paceline
from paceline.train.recipe_objects import build_data

RECIPES = Path(__file__).parents[1] / "recipes"
MLP = {"name": "mlp", "inputs": 2048, "width": 2048, "hidden": 4, "classes": 10}
RATES = (1000, 200)
SIZES = ("1", "25", "100", "auto")
SILENT = ("run=false", "quiet=true", "device=cpu", "strategy=ddp", "data.sharded=false", "save_last=false")
WARM_UP = 2


class Timed(list[Any]):
    """Batches that note when they are requested: a step is over when the next one is."""

    def __iter__(self) -> Iterator[Any]:
        self.times: list[float] = []
        for batch in super().__iter__():
            self.times.append(time.perf_counter())
            yield batch


def gpt(overrides: Sequence[str]) -> paceline.Config:
    return paceline.Config.default(overrides)


def resnet18(overrides: Sequence[str]) -> paceline.Config:
    return paceline.Config.from_file(RECIPES / "resnet.yaml", ["model.name=resnet18", "batch=16", *overrides])


def mlp(overrides: Sequence[str]) -> paceline.Config:
    return paceline.Config.from_dict({"model": MLP, "optimizer": "adamw", "batch": 8}, overrides)


MODELS = {"gpt": gpt, "resnet18": resnet18, "mlp": mlp}


def batches_of(model: str, count: int) -> list[Any]:
    config = MODELS[model](SILENT)
    size = config.batch or 0
    if model == "mlp":
        samples: list[Any] = [{"inputs": torch.randn(2048), "targets": torch.tensor(n % 10)} for n in range(4 * size)]
    else:
        data = build_data(config)[0]
        samples = [data[index] for index in range(4 * size)]
    parts = [default_collate(samples[start : start + size]) for start in range(0, len(samples), size)]
    return list(islice(cycle(parts), count))


def measure(model: str, rate: int, rounds: int, steps: int) -> dict[str, Any]:
    """On a rank."""
    limit_rate(rate)
    batches = Timed(batches_of(model, steps + WARM_UP + 1))
    seconds: dict[str, list[float]] = {size: [] for size in SIZES}
    choices, gradients = [], 0
    for _ in range(rounds):
        for size in SIZES:
            trainer = paceline.Trainer.from_config(MODELS[model]([*SILENT, f"ddp.bucket_mb={size}"]))
            trainer.train(batches, max_steps=len(batches))
            times = batches.times[WARM_UP:]
            seconds[size] += [after - before for before, after in pairwise(times)]
            gradients = sum(parameter.nbytes for parameter in trainer.model.parameters() if parameter.requires_grad)
            if size == "auto":
                choices.append(trainer.config.ddp.bucket_mb)
    return {"seconds": seconds, "choices": choices, "gradients": gradients}


def cell(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f} ({1000 * min(seconds):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--rates", nargs="*", type=int, default=RATES, help="of the link, in Mb/s")
    options = parser.parse_args()
    print(f"| model | gradients | link | {' | '.join(f'{size} MB' for size in SIZES[:-1])} | auto | selected |")
    print("|---|---|---|" + "---|" * (len(SIZES) + 1))
    with two_machines() as pair:
        for model in options.models:
            for rate in options.rates:
                found = on_both(pair, partial(measure, model, rate, options.rounds, options.steps))
                cells = [cell(found["seconds"][size]) for size in SIZES]
                choices = ", ".join(f"{choice:g}" for choice in found["choices"])
                size = f"{found['gradients'] / 2**20:.1f} MiB"
                print(f"| {model} | {size} | {rate} Mb/s | {' | '.join(cells)} | {choices} |", flush=True)


if __name__ == "__main__":
    main()
