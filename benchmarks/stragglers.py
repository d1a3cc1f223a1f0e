"""Whether a slow rank is named, and how soon: runs in which a random rank takes twice its time from a random step on,
and as many healthy ones.

    python benchmarks/stragglers.py [--runs 50] [--load 2]

Ranks share the cores of this machine. A slow rank multiplies matrices in its forward, or sleeps while it reads a
sample. `--load` runs so many processes beside them that only count.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import re
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline import dist

WIDTH, LAYERS, BATCH, AFTER = 256, 4, 48, 40  # AFTER: steps after a rank has become slow
NAMED = re.compile(r"rank (\d+) has been ([\d.]+) × slower than the others since step (\d+): (\w+)")
KINDS = {"computing": "compute", "reading": "data"}


class Slowness:
    """What this rank does in addition, from a step on."""

    def __init__(self, kind: str, rank: int, start: int) -> None:
        self.kind, self.start, self.mine = kind, start, kind != "healthy" and rank == dist.rank()
        self.step, self.cpu, self.seconds = 0, time.thread_time(), 0.0

    def on_step(self, record: Any) -> None:
        now = time.thread_time()
        if 2 < record.step < self.start:
            self.seconds = (now - self.cpu) / 3 + self.seconds * 2 / 3  # that a step takes this rank by itself
        self.step, self.cpu = record.step, now

    def applies(self, kind: str) -> bool:
        return self.mine and self.kind == kind and self.step + 1 >= self.start


class Samples(Dataset[tuple[Tensor, Tensor]]):
    draws_randomness = False

    def __init__(self, slowness: Slowness) -> None:
        self.slowness = slowness

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.slowness.applies("data"):
            time.sleep(self.slowness.seconds * dist.world() / BATCH)
        return torch.ones(WIDTH), torch.ones(1)


class Model(nn.Module):
    def __init__(self, slowness: Slowness) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 1))
        self.slowness = slowness

    def forward(self, inputs: Tensor) -> Tensor:
        if self.slowness.applies("compute"):
            until = time.thread_time() + self.slowness.seconds
            while time.thread_time() < until:
                inputs.T @ inputs
        outputs: Tensor = self.layers(inputs)
        return outputs


def train(kind: str, strategy: str, slow: int, start: int) -> list[tuple[int, str]]:
    """What rank 0 said about slow ranks, and after which step."""
    said: list[tuple[int, str]] = []
    handler = logging.Handler()
    slowness = Slowness(kind, slow, start)
    handler.emit = lambda record: said.append((slowness.step, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    trainer = paceline.Trainer(
        Model(slowness), "sgd", criterion=nn.MSELoss(), device="cpu", strategy=strategy, batch=BATCH, run=False,
        callbacks=[slowness], preflight=False,
    )  # fmt: skip
    trainer.train(Samples(slowness), max_steps=start + AFTER)
    return [(step, text) for step, text in said if "slower" in text]


def count(stop: Any) -> None:
    while not stop.is_set():
        sum(range(100_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50, help="slow ones, and as many healthy ones")
    parser.add_argument("--load", type=int, default=0, help="processes that keep cores busy")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw, context = random.Random(options.seed), multiprocessing.get_context("fork")
    stop = context.Event()
    others = [context.Process(target=count, args=(stop,), daemon=True) for _ in range(options.load)]
    for process in others:
        process.start()
    rows: dict[str, list[tuple[bool, int, bool]]] = {}
    for number in range(2 * options.runs):
        kind = ("healthy", draw.choice(("compute", "data")))[number % 2]
        strategy, ranks = draw.choice(("ddp", "fsdp")), draw.choice((2, 3, 4))
        slow, start = draw.randrange(ranks), draw.randrange(5, 35)
        said = paceline.launch(train, ranks=ranks, kind=kind, strategy=strategy, slow=slow, start=start)
        named = [(step, found) for step, text in said if (found := NAMED.search(text))]
        right = [step - start + 1 for step, found in named if (int(found[1]), KINDS[found[4]]) == (slow, kind)]
        false = [found for _, found in named if int(found[1]) != slow or kind == "healthy"]
        rows.setdefault(kind, []).append((bool(right), right[0] if right else 0, bool(false)))
        if (not right and kind != "healthy") or false:
            print(f"{kind}, {strategy}, {ranks} ranks, rank {slow} slow from step {start}: {said}", flush=True)
    stop.set()
    print("| runs | number | named rightly | steps until then, median | at most | another rank named |")
    print("|---|---|---|---|---|---|")
    for kind, found in sorted(rows.items()):
        steps = [after for right, after, _ in found if right] or [0]
        rightly = "" if kind == "healthy" else sum(right for right, *_ in found)
        after = ("", "") if kind == "healthy" else (median(steps), max(steps))
        print(f"| {kind} | {len(found)} | {rightly} | {after[0]} | {after[1]} | {sum(wrong for *_, wrong in found)} |")


if __name__ == "__main__":
    main()
