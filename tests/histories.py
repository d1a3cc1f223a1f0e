"""Runs that are stopped, killed and moved to other ranks, compared with an uninterrupted one.

A history is a list of legs: each starts the run anew (`resume: auto`, or from a checkpoint that was saved by hand), on
a layout of its own, and ends in its own way. What matters is what metrics.jsonl tells in the end: every step once, with
the loss and the learning rate that it has without a stop; and that each step was trained on the samples that are its
own.

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
from paceline.data.loader import MicroBatch
from paceline.models.gpt import GPT
from paceline.runtime import collectives
from paceline.tools.testing.comparison import ParityLayout

STEPS, SAMPLES, BATCH, SAVE_EVERY, EVAL_EVERY = 30, 50, 12, 7, 3
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)
# And how often one is drawn: a step of the rare ones costs thirty of the first on two cores.
LAYOUTS = {
    "single": 6, "ddp:2": 5, "ddp:3": 3, "ddp:4": 2, "fsdp:2": 3, "fsdp:3": 2, "fsdp:4": 1, "hsdp:4": 1, "tp:2": 2,
    "shard=2 tensor=2": 1, "pp:2": 3, "pipeline=2 shard=2": 1,
}  # fmt: skip
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
    evaluates: bool = False
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
    "eval_every": EVAL_EVERY, "early_stop": {"patience": 50, "min_delta": 0.5}, "save_best": "loss",
}  # fmt: skip
CASES = (
    Case("cosine", evaluates=True, settings={"optimizer": _ADAMW, "schedule": _COSINE}),
    Case("plateau", evaluates=True, settings={"optimizer": _ADAMW, **_PLATEAU}),
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
        return ParityLayout.read(self.layout).ranks

    def __str__(self) -> str:
        extras = [f"workers {self.workers}"] * bool(self.workers) + [f"accumulate {self.accumulate}"] * (
            self.accumulate > 1
        )
        return ", ".join([f"{self.layout} {self.ends} at {self.until}", *extras])


@dataclass(frozen=True)
class History:
    """A run's life. `number` names it among others."""

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
    starts: list[tuple[Path, int]] = field(default_factory=list)  # each leg's run folder, and the step it began after
    wrong: list[str] = field(default_factory=list)


def drawn(number: int) -> History:
    """A history from a number: always the same one."""
    draw = random.Random(number)

    def leg(until: int) -> Leg:
        ends = "stopped" if until == STEPS else draw.choice(ENDINGS)
        workers = draw.choice((0,) * 15 + (2,))  # starting them takes as long as a dozen steps
        [layout] = draw.choices(list(LAYOUTS), list(LAYOUTS.values()))
        return Leg(layout, until, ends, workers, accumulate=draw.choice((1, 1, 2)))

    stops = sorted(draw.sample(range(1, STEPS), draw.choice((1, 1, 2, 2, 3, 4))))
    return History(CASES[number % len(CASES)], tuple(leg(until) for until in (*stops, STEPS)), number)


class Broken(Exception):
    pass


class EndsTraining:
    """Ends training behind a step's record, on every rank."""

    def __init__(self, at: int, by_hand: Path | None) -> None:
        self._at, self._by_hand = at, by_hand
        self.trainer: paceline.Trainer | None = None

    def on_log(self, record: dict[str, Any]) -> None:
        if record["step"] == self._at:
            if self._by_hand is not None and self.trainer is not None:
                self.trainer.save_checkpoint(self._by_hand)
            raise Broken


def live(histories: Sequence[History], folder: Path) -> list[Told]:
    """All of them, leg by leg; legs on the same number of ranks share a world."""
    told = [Told() for _ in histories]
    for place in range(max(len(history.legs) for history in histories)):
        now = [number for number, history in enumerate(histories) if place < len(history.legs)]
        for ranks in sorted({histories[number].legs[place].ranks for number in now}):
            same = [number for number in now if histories[number].legs[place].ranks == ranks]
            work = [(histories[number], place, folder / f"run-{histories[number].number}") for number in same]
            results = paceline.launch(_legs, ranks=ranks, work=work)
            for number, (run, start, samples) in zip(same, results, strict=True):
                told[number].starts.append((Path(run), start))
                told[number].samples |= _by_step(samples)
    for one in told:
        _read_metrics(one)
    return told


def _legs(work: Sequence[tuple[History, int, Path]]) -> list[tuple[str, int, list[Noted]]]:
    return [_leg(history, place, folder) for history, place, folder in work]


def _leg(history: History, place: int, folder: Path) -> tuple[str, int, list[Noted]]:
    leg, saved = history.legs[place], [n for n, each in enumerate(history.legs[:place]) if each.ends == "by-hand"]
    run = folder / f"after-{len(saved)}"
    settings: dict[str, Any] = {
        **ParityLayout.read(leg.layout).settings, "run": str(run), "resume": "auto", "workers": leg.workers,
        "accumulate": leg.accumulate, "save_every": SAVE_EVERY, "save_last": leg.ends == "stopped",
        "checkpoint": {"on_error": leg.ends == "failed"},
    }  # fmt: skip
    if saved and not list(run.glob("checkpoints/step-*")):
        settings["resume"] = str(folder / f"by-hand-{saved[-1]}")
    by_hand = folder / f"by-hand-{place}" if leg.ends == "by-hand" else None
    ending = EndsTraining(leg.until, by_hand)
    ending.trainer = trainer = history.case.trainer([ending] if leg.ends != "stopped" else [], **settings)
    start, samples = trainer.step_count, _noted(trainer)
    try:
        val = Tokens(7) if history.case.evaluates else None
        trainer.train(Tokens(), val, max_steps=leg.until if leg.ends == "stopped" else STEPS)
    except Broken:
        pass
    return str(trainer._run.folder), start, [each for own in collectives.all_gather_object(samples) for each in own]


def _noted(trainer: paceline.Trainer) -> list[Noted]:
    """What this rank trains on from now on. Ranks that see what another one sees too, a stage behind the first or a
    second part of the layers, note nothing."""
    engine = trainer._engine
    noted: list[Noted] = []
    add = engine.stepper.add

    def note(micro: MicroBatch) -> None:
        noted.extend((micro.step + 1, micro.start + n, index) for n, index in enumerate(micro.indices[: micro.samples]))
        add(micro)

    if engine.mesh.coords["tensor"] == engine.mesh.coords["pipeline"] == 0:
        engine.stepper.add = note  # type: ignore[method-assign]
    return noted


def _by_step(noted: Sequence[Noted]) -> dict[int, list[int]]:
    samples: dict[int, list[int]] = {}
    for step, place, index in sorted(noted):
        assert place == len(samples.setdefault(step, [])), f"step {step} has no sample, or two, at {place}"
        samples[step].append(index)
    return samples


def _read_metrics(told: Told) -> None:
    """Each leg's run goes on from where the leg began: what another one told of later steps did not happen."""
    for run, start in told.starts:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [record["step"] for record in lines if not record.get("evaluation")]
        if steps != list(range(steps[0], steps[-1] + 1)):
            told.wrong.append(f"steps in {run.name}/metrics.jsonl: {steps}")
        for records, evaluations in ((told.records, False), (told.evaluations, True)):
            kept = [each for each in records if each["step"] <= start]
            # An evaluation that was due behind the step may have been made up for by the leg that went on from it.
            first = start if evaluations and start not in [each["step"] for each in kept] else start + 1
            new = [each for each in lines if bool(each.get("evaluation")) == evaluations and each["step"] >= first]
            records[:] = kept + new


def hashes(checkpoint: Path) -> dict[str, list[list[str]]]:
    """Of every tensor's pieces: checkpoints of the same layout have the same ones if, and only if, they hold the same
    bits."""
    tensors = json.loads((checkpoint / "manifest.json").read_text())["tensors"]
    return {name: [chunk["hashes"] for chunk in entry["chunks"]] for name, entry in tensors.items()}


def unbroken(case: Case, folder: Path, layout: str = "single") -> Told:
    return live([History(case, (Leg(layout, STEPS),))], folder / case.name)[0]


@dataclass(frozen=True)
class Difference:
    """From the run without a stop: the largest relative ones, and what is plainly wrong."""

    loss: float
    evaluation: float
    wrong: tuple[str, ...]


def compare(reference: Told, told: Told) -> Difference:
    wrong = list(told.wrong)
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
        _largest(reference.records, told.records, "loss"), _largest(reference.evaluations, theirs, "loss"), tuple(wrong)
    )


def _largest(reference: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], key: str) -> float:
    if len(reference) != len(other):
        return float("inf")
    return max((abs(a[key] - b[key]) / abs(a[key]) for a, b in zip(reference, other, strict=True)), default=0.0)
