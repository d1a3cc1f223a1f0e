"""Runs that are stopped, broken off and moved to other ranks, beside one that was never touched.

A history is a list of legs: each starts the run anew (`resume: auto`), on a layout of its own, and ends in its own way.
What matters is what the run's folder tells in the end: every step once, with the loss and the learning rate that it has
without a stop; and that every step was trained on the samples that are its own.

The model is a gpt of 8,000 weights, so that a leg costs tenths of a second. Its data draws random numbers, its number
of samples is no multiple of the batch, and an epoch ends after every fifth of 30 steps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

import paceline
from paceline.data.loader import Micro
from paceline.models.gpt import GPT
from paceline.runtime import collectives
from paceline.testing.comparison import Layout

STEPS, SAMPLES, BATCH, SAVE_EVERY = 30, 50, 12, 4
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
LAYOUTS = (
    "single", "ddp:2", "ddp:3", "ddp:4", "fsdp:2", "fsdp:3", "fsdp:4", "hsdp:4", "tp:2", "shard=2 tensor=2", "pp:2",
    "pipeline=2 shard=2",
)  # fmt: skip
BOUNDS = {"fp64": 1e-9, "fp32": 1e-6}

# stopped: by max_steps, with a checkpoint there. by-hand: with save_checkpoint, from which a new run begins. failed: an
# exception, and the save that it brings about. killed: what was trained since the last scheduled save is lost.
Ending = Literal["stopped", "by-hand", "failed", "killed"]
ENDINGS: tuple[Ending, ...] = ("stopped", "by-hand", "failed", "killed")

Noted = tuple[int, int, int]  # a step, a place in its global batch, and the sample that was there


class Tokens(Dataset[dict[str, Tensor]]):
    """Sample i counts up from i; one of its tokens is another one in every epoch."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = (index * 5 + torch.arange(9) * (1 + index % 3)) % 64
        window[int(torch.randint(9, ()))] = index % 64
        return {"inputs": window[:-1], "targets": window[1:]}


@dataclass(frozen=True)
class Case:
    """What is trained: all legs of a history train the same."""

    name: str
    precision: str = "fp64"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    scheduler: str | None = None  # of torch
    dropout: float = 0.0

    def trainer(self, callbacks: Sequence[Any] = (), **settings: Any) -> paceline.Trainer:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = GPT(layers=2, width=16, heads=2, vocabulary=64, context=8, dropout=self.dropout)
        given: dict[str, Any] = {
            "precision": self.precision, "batch": BATCH, "clip_norm": 1.0, "ema": 0.9, "log_every": 1, "quiet": True,
            "device": "cpu", **self.settings, **settings,
        }  # fmt: skip
        if self.scheduler is not None:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = getattr(torch.optim.lr_scheduler, self.scheduler)
            options = {"milestones": [1, 3, 4]} if self.scheduler == "MultiStepLR" else {"step_size": 7}
            interval = "epoch" if self.scheduler == "MultiStepLR" else "step"
            given |= {"optimizer": optimizer, "scheduler_interval": interval}
            given["scheduler"] = scheduler(optimizer, gamma=0.5, **options)
        return paceline.Trainer(model, callbacks=callbacks, **given)


_ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
_COSINE = {"name": "cosine", "warmup": 4, "steps": STEPS}
# A plateau that is one at most evaluations, so that the rate is cut several times; and an end that never comes.
_PLATEAU = {
    "schedule": {"name": "plateau", "patience": 0, "threshold": 0.2, "factor": 0.7},
    "eval_every": 3, "early_stop": {"patience": 50, "min_delta": 0.5}, "save_best": "loss",
}  # fmt: skip
CASES = (
    Case("cosine", settings={"optimizer": _ADAMW, "schedule": _COSINE}),
    Case("plateau", settings={"optimizer": _ADAMW, **_PLATEAU}),
    Case("MultiStepLR", scheduler="MultiStepLR"),
    Case("StepLR", scheduler="StepLR"),
    # AdamW would divide key biases' gradients, which are pure rounding, by themselves.
    Case(
        "fp32", "fp32", settings={"optimizer": {"name": "sgd", "lr": 0.3, "momentum": 0.5}, "schedule": _COSINE}
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Leg:
    layout: str
    until: int
    ends: Ending = "stopped"
    workers: int = 0
    accumulate: int = 1

    @property
    def ranks(self) -> int:
        return Layout.read(self.layout).ranks

    def __str__(self) -> str:
        extras = [f"workers {self.workers}"] * bool(self.workers) + [f"accumulate {self.accumulate}"] * (
            self.accumulate > 1
        )
        return ", ".join([f"{self.layout} {self.ends} at {self.until}", *extras])


@dataclass(frozen=True)
class History:
    """A run's life. `number` names it."""

    case: Case
    legs: tuple[Leg, ...]
    number: int = 0

    def __str__(self) -> str:
        return f"{self.number}, {self.case.name}: " + "; ".join(map(str, self.legs))


@dataclass
class Told:
    """What a run tells of itself."""

    records: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)  # by step, in the order of the global batch
    starts: list[int] = field(default_factory=list)  # after which step each leg began


def drawn(number: int) -> History:
    """A history from a number: always the same one."""
    draw = random.Random(number)
    stops = sorted(draw.sample(range(1, STEPS), draw.choice((1, 1, 2, 2, 3, 4))))
    legs = [
        Leg(
            draw.choice(LAYOUTS),
            until,
            draw.choice(ENDINGS),
            workers=draw.choice((0,) * 15 + (2,)),
            accumulate=draw.choice((1, 2, 3)),
        )
        for until in stops
    ]
    legs.append(Leg(draw.choice(LAYOUTS), STEPS, workers=draw.choice((0,) * 15 + (2,)), accumulate=draw.choice((1, 2))))
    return History(CASES[number % len(CASES)], tuple(legs), number)


class Failing:
    """Raises on every rank, behind the step's record."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_log(self, record: dict[str, Any]) -> None:
        if record["step"] == self._at:
            raise Broken


class Broken(Exception):
    pass


def live(histories: Sequence[History], folder: Path) -> list[Told]:
    """All of them, leg by leg; legs on the same number of ranks share a world."""
    told = [Told() for _ in histories]
    for place in range(max(len(history.legs) for history in histories)):
        now = [number for number, history in enumerate(histories) if place < len(history.legs)]
        for ranks in sorted({histories[number].legs[place].ranks for number in now}):
            same = [number for number in now if histories[number].legs[place].ranks == ranks]
            work = [(histories[number], place, folder / f"run-{histories[number].number}") for number in same]
            for number, (start, samples) in zip(same, paceline.launch(_legs, ranks=ranks, work=work), strict=True):
                told[number].starts.append(start)
                told[number].samples |= _by_step(samples)
    for history, one in zip(histories, told, strict=True):
        _read_metrics(folder / f"run-{history.number}", one)
    return told


def _legs(work: Sequence[tuple[History, int, Path]]) -> list[tuple[int, list[Noted]]]:
    return [_leg(history.case, history.legs[place], folder) for history, place, folder in work]


def _leg(case: Case, leg: Leg, folder: Path) -> tuple[int, list[Noted]]:
    last = leg.until == STEPS
    settings: dict[str, Any] = {
        **Layout.read(leg.layout).settings, "run": str(folder / "run"), "resume": "auto", "workers": leg.workers,
        "accumulate": leg.accumulate, "save_every": SAVE_EVERY, "save_last": leg.ends == "stopped",
        "checkpoint": {"on_error": leg.ends == "failed"},
    }  # fmt: skip
    breaks = leg.ends in ("failed", "killed") and not last
    trainer = case.trainer([Failing(leg.until)] if breaks else [], **settings)
    by_hand = folder / "by-hand"
    if by_hand.exists() and json.loads((by_hand / "manifest.json").read_text())["step"] > trainer.step_count:
        trainer.load_checkpoint(by_hand)
    start, samples = trainer.step_count, _noted(trainer)
    try:
        trainer.train(Tokens(), Tokens(7), max_steps=STEPS if breaks else leg.until)
    except Broken:
        pass
    if leg.ends == "by-hand":
        trainer.save_checkpoint(by_hand, overwrite=True)
    return start, [each for own in collectives.all_gather_object(samples) for each in own]


def _noted(trainer: paceline.Trainer) -> list[Noted]:
    """What this rank trains on from now on. Ranks that see what another one sees too, a stage behind the first or a
    second part of the layers, note nothing."""
    engine = trainer._engine
    noted: list[Noted] = []
    add = engine.stepper.add

    def note(micro: Micro) -> None:
        noted.extend((micro.step + 1, micro.start + n, index) for n, index in enumerate(micro.indices[: micro.samples]))
        add(micro)

    if engine.mesh.place["tensor"] == engine.mesh.place["pipeline"] == 0:
        engine.stepper.add = note  # type: ignore[method-assign]
    return noted


def _by_step(noted: Sequence[Noted]) -> dict[int, list[int]]:
    samples: dict[int, list[int]] = {}
    for step, place, index in sorted(noted):
        assert place == len(samples.setdefault(step, [])), f"step {step} has no sample, or two, at {place}"
        samples[step].append(index)
    return samples


def _read_metrics(folder: Path, told: Told) -> None:
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        (told.evaluations if record.get("evaluation") else told.records).append(record)


def unbroken(case: Case, folder: Path, layout: str = "single") -> Told:
    return live([History(case, (Leg(layout, STEPS),))], folder / case.name)[0]


@dataclass(frozen=True)
class Difference:
    """From the run without a stop: the largest relative ones, and what is plainly wrong."""

    loss: float
    evaluation: float
    wrong: tuple[str, ...]


def compare(reference: Told, told: Told) -> Difference:
    wrong = []
    if [record["step"] for record in told.records] != list(range(1, STEPS + 1)):
        wrong.append(f"steps in metrics.jsonl: {[record['step'] for record in told.records]}")
    if told.samples != reference.samples:
        differing = [step for step in reference.samples if told.samples.get(step) != reference.samples[step]]
        wrong.append(f"other samples in steps {differing}")
    for epoch in range(STEPS // STEPS_PER_EPOCH):
        steps = range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1)
        if sorted(index for step in steps for index in told.samples.get(step, [])) != list(range(SAMPLES)):
            wrong.append(f"epoch {epoch} did not have each sample once")
    rates = _largest(reference.records, told.records, "lr")
    if rates > 1e-12:
        wrong.append(f"learning rates differ by {rates:.0e}")
    # A leg that stops evaluates at its end, where the unbroken run does not: those are further ones.
    ends = {record["step"]: record for record in told.evaluations}
    if len(ends) != len(told.evaluations):
        wrong.append(f"evaluations: {[record['step'] for record in told.evaluations]}")
    theirs = [ends.get(record["step"], {"loss": float("inf")}) for record in reference.evaluations]
    return Difference(
        _largest(reference.records, told.records, "loss"),
        _largest(reference.evaluations, theirs, "loss"),
        tuple(wrong),
    )


def _largest(reference: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], key: str) -> float:
    if len(reference) != len(other):
        return float("inf")
    return max(abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(reference, other, strict=True))
