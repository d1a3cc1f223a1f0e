"""False alarms while gradients are accumulated. Exit status 1 if a training raises, or warns.

    python benchmarks/accumulation.py                                # 12,000 trainings: 200 of each case
    python benchmarks/accumulation.py --trainings 20 --seconds 600   # of each case; stops after ten minutes

A case is one of four models and `accumulate` from 2 to 16; trainings take turns in `train()`, `training_step` and
`no_sync`. Most run in launches of two ranks that hold 40 of them, each with a new Trainer; the first of each case runs
in a launch of its own, because what gradients leave in memory depends on what a process did before.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
import paceline.train.trainer  # imported once, before ranks are forked
from paceline.errors import PacelineError

GROUPS = range(2, 17)
LOOPS = ("train", "training-step", "no-sync")
STEPS, TOGETHER = 4, 40


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mirror, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.mirror.weight = self.again.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mirror(torch.tanh(self.again(self.first(inputs))))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(2, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.cell(inputs.unflatten(1, (4, 2)))[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def convolutions() -> nn.Module:
    layers = (nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "tied": Tied, "recurrent": Recurrent, "convolutions": convolutions,
}  # fmt: skip
Case = tuple[str, int, str]  # model, accumulate, loop


def train(case: Case) -> None:
    name, groups, loop = case
    samples = STEPS * groups * 2
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = MODELS[name]()
    settings: dict[str, Any] = {"quiet": True, "run": False, "device": "cpu", "sync_batchnorm": False}
    if loop != "no-sync":
        settings["accumulate"] = groups
    trainer = paceline.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), criterion=nn.MSELoss(), batch=2 * groups, **settings
    )
    if loop == "train":
        trainer.train(data, epochs=1)
        return
    if loop == "training-step":
        for batch in trainer.loader(data):
            trainer.training_step(batch)
        return
    for _ in range(STEPS):
        for number in range(groups):
            start = 2 * number + paceline.dist.rank()
            with trainer.no_sync() if number < groups - 1 else nullcontext():
                trainer.backward(trainer.forward(data[start : start + 1]))
        trainer.step()


def alarms_of(cases: list[Case]) -> list[str]:
    """Run trainings one after the other, on every rank. Returns what was raised or said."""
    found: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    logging.getLogger("paceline").handlers = [Listen()]
    for case in cases:
        before = len(found)
        try:
            train(case)
        except PacelineError as error:
            return [*found, f"{case}: {error}"]  # ranks may have gone apart
        found[before:] = [f"{case}: {text}" for text in found[before:] if not text.startswith("data: training waits")]
    return found


def launches(trainings: int) -> Iterable[list[Case]]:
    """The trainings of each launch."""
    cases = [(model, groups) for groups in GROUPS for model in MODELS]
    yield from ([(*case, LOOPS[number % 3])] for number, case in enumerate(cases))
    rest = [(*case, LOOPS[(number + again) % 3]) for again in range(1, trainings) for number, case in enumerate(cases)]
    yield from (rest[start : start + TOGETHER] for start in range(0, len(rest), TOGETHER))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=200, help="of each model with each number of micro-batches")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no launch begins")
    options = parser.parse_args()
    began, trained, launched, failed = time.perf_counter(), 0, 0, 0
    for cases in launches(options.trainings):
        if time.perf_counter() - began > options.seconds:
            break
        try:
            alarms = paceline.launch(alarms_of, ranks=2, cases=cases)
        except PacelineError as error:
            alarms = [f"{cases[0]} …: {error}"]
        for alarm in alarms:
            print(alarm, flush=True)
        trained, launched, failed = trained + len(cases), launched + 1, failed + bool(alarms)
    seconds = time.perf_counter() - began
    print(f"{trained} trainings in {launched} launches and {seconds:.0f} s: {failed} launches with alarms")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
