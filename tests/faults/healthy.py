"""A training in which nothing is wrong, but much is slow: `healthy.py PLAN`, on every rank. PLAN is JSON: seed, layout,
steps, and the seconds of a step.

Now and then a rank takes ten times as long for a step, collects garbage of a large heap, or is in a long callback; all
save and evaluate.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline

PLAN: dict[str, Any] = json.loads(sys.argv[1])
RANK, BATCH, SAMPLES = int(os.environ["RANK"]), 16, 3200
SLOW, GARBAGE, LONG = 0.01, 0.004, 0.001  # of the steps of a rank
CYCLES = 300_000  # objects to collect
LONGEST = 1.5  # seconds of a callback


class Samples(Dataset[tuple[Tensor, Tensor]]):
    draws_randomness = False

    def __init__(self, length: int, seconds: float = 0.0) -> None:
        self.length, self.seconds = length, seconds
        self.inputs = torch.randn(length, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return self.inputs[index], (self.inputs[index, 0] > 0).long()


class Life:
    def __init__(self) -> None:
        self.chance = random.Random(f"{PLAN['seed']} {RANK}")
        self.happened = {"slow": 0, "garbage": 0, "long": 0}

    def on_step(self, record: Any) -> None:
        time.sleep(PLAN["seconds"] * self.chance.uniform(0.5, 1.5))
        draw = self.chance.random()
        if draw < SLOW:
            self.happened["slow"] += 1
            time.sleep(10 * PLAN["seconds"])
        elif draw < SLOW + GARBAGE:
            self.happened["garbage"] += 1
            make_garbage()
            gc.collect()
        elif draw < SLOW + GARBAGE + LONG:
            self.happened["long"] += 1
            time.sleep(self.chance.uniform(0.3, LONGEST))

    def on_end(self, record: Any) -> None:
        Path(f"happened-{RANK}").write_text(json.dumps(self.happened))


def make_garbage() -> None:
    cycles: list[list[Any]] = [[] for _ in range(CYCLES)]
    for each in cycles:
        each.append(each)


def main() -> None:
    layout = PLAN["layout"]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    trainer = paceline.Trainer(
        model, {"name": "adamw", "lr": 1e-3}, criterion=nn.CrossEntropyLoss(), batch=BATCH, strategy=layout,
        callbacks=[Life()], run="healthy", save_every=PLAN["steps"] // 8, workers=PLAN["workers"],
        eval_every=PLAN["steps"] // 6,
        **({"tensor": {"plan": {"0": "column", "2": "row"}}} if layout == "tp" else {}),
    )  # fmt: skip
    # An evaluation takes many times as long as a step.
    trainer.train(Samples(SAMPLES), Samples(320, seconds=0.01), max_steps=PLAN["steps"])


if __name__ == "__main__":
    main()
