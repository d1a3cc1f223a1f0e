"""Follows the advice about slow input: trains with reading that takes longer than a step, takes the number of workers
that the Trainer names, and trains with them.

    python benchmarks/slow_input.py [--read-ms 20] [--step-ms 10]

Reading is a sleep, as for a disk or the network, so that it shows on few cores.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.plan import slow_input

BATCH, STEPS, LOG_EVERY = 8, 240, 20


class Slow(Dataset[tuple[Tensor, Tensor]]):
    draws_randomness = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return torch.ones(64), torch.ones(1)


class Model(nn.Module):
    """Takes a given time, without using the CPU, like a GPU."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(64, 1), seconds

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.seconds)
        outputs: Tensor = self.layer(inputs)
        return outputs


def train(options: Any, workers: int) -> tuple[float, float, str]:
    """The median share of waiting, samples per second, and what was said."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(said):
        settings: dict[str, Any] = {"batch": BATCH, "log_every": LOG_EVERY, "workers": workers, "run": f"{folder}/run"}
        trainer = paceline.Trainer(
            Model(options.step_ms / 1e3), "sgd", criterion=nn.MSELoss(), device="cpu", save_last=False, **settings
        )
        trainer.train(Slow(options.read_ms / 1e3 / BATCH), max_steps=STEPS)
        records = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    points = [record for record in records if "data_wait" in record][2:]
    waits, rates = sorted(each["data_wait"] for each in points), sorted(each["samples_per_second"] for each in points)
    lines = [line for line in said.getvalue().splitlines() if "training waits for data" in line]
    return waits[len(waits) // 2], rates[len(rates) // 2], lines[0] if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--read-ms", type=float, default=20.0, help="to read a batch")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a step without reading")
    options = parser.parse_args()
    slow_input.WINDOW = 1.0
    workers = 0
    for _ in range(3):
        share, rate, said = train(options, workers)
        print(f"workers: {workers}  data wait {share:.0%}  {rate:.0f} samples/s")
        if not said:
            break
        print(f"    {said}")
        found = re.search(r"workers: (\d+) would be enough", said)
        if found is None:
            break
        workers = int(found[1])


if __name__ == "__main__":
    main()
