"""Runs a program with paceline and compares it with plain PyTorch: the same, refused, warned about, or a violation."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import paceline
from heard import of_training
from paceline import dist
from paceline.errors import PacelineError
from paceline.tools.testing.runner import RankFailure, run_on_ranks
from programs import parts
from programs.program import (
    CUSTOM_LOOPS,
    EPOCHS,
    LAYOUTS,
    STEPS,
    Program,
    Result,
    generator,
    judge_loss,
    loss_of,
    maker_loss,
    train_plainly,
    trained_together,
    with_metrics,
)

DEADLINE = 120.0  # seconds; a run takes one or two
# Warnings that explain no difference from a plain loop.
UNRELATED = ("the loss does not depend on",)
VIOLATIONS = ("silent", "crash", "hang", "false alarm")


@dataclass
class Outcome:
    """`kind` is same, refused, warned, late (warned about when a later batch showed it), or one of VIOLATIONS."""

    program: Program
    kind: str
    text: str = ""  # the code of an error, the warning, or what differs
    difference: float = 0.0

    @property
    def is_violation(self) -> bool:
        return self.kind in VIOLATIONS


@dataclass
class _Said:
    """Warnings of a rank, each with whether a step had been taken."""

    notes: Path
    lines: list[tuple[str, bool]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def on_log(self, record: Any) -> None:
        self.losses.append(record["loss"])

    def write(self, kind: str) -> None:
        (self.notes / f"{kind}-{dist.rank()}.json").write_text(json.dumps(self.lines))

    @contextmanager
    def listening(self) -> Iterator[None]:
        said = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if not record.getMessage().startswith(UNRELATED):
                    said.lines.append((record.getMessage(), bool(said.losses)))

        logger = logging.getLogger("paceline")
        before = logger.handlers, logger.propagate  # ranks may wait for another program
        handler = Handler(logging.WARNING)
        handler.addFilter(of_training)
        logger.handlers, logger.propagate = [handler], False
        try:
            yield
        finally:
            logger.handlers, logger.propagate = before


def try_program(
    program: Program, fault: Callable[[], None] | None = None, run: Callable[..., None] = run_on_ranks
) -> Outcome:
    """`fault` is built into every rank, to see that it is found. `run` starts the ranks, or uses those that wait. Ranks
    that will be killed are always started."""
    try:
        expected = train_plainly(program)
    except Exception as error:  # paceline need not do better than torch
        return Outcome(program, "same", f"plain torch: {type(error).__name__}: {error}")
    with tempfile.TemporaryDirectory(prefix="paceline-programs-") as name:
        folder = Path(name)
        phases = [(program.layout, None, None)]
        if program.stop is not None:
            phases = [(program.layout, None, program.stop), (program.layout_after, program.stop, None)]
        for number, (layout, first, last) in enumerate(phases):
            (folder / str(number)).mkdir()
            try:
                (run_on_ranks if program.killed and last is not None else run)(
                    LAYOUTS[layout][0],
                    lambda: _train(program, layout, first, last, folder, folder / str(number), fault),  # noqa: B023
                    timeout=DEADLINE,
                )
            except RankFailure as failure:
                if program.killed and last is not None and not _read(folder / str(number), "said"):
                    continue  # as intended: nothing was written any more
                return _failed(program, folder / str(number), failure)
        saved = sorted(folder.glob("*/result.pt"))
        results = [torch.load(path, weights_only=False) for path in saved]
        if program.killed:
            results = [replace(results[-1], losses=_recorded(folder / "run" / "metrics.jsonl"))]
        notes = [(folder / str(number), kind) for number in range(len(phases)) for kind in ("killed", "said")]
        said = [tuple(line) for each in notes for line in _read(*each)]
    losses = [loss for result in results for loss in result.losses]
    return _compared(program, expected, Result(losses, results[-1].weights, results[-1].evaluation), said)


def _recorded(metrics: Path) -> list[float]:
    """The loss of every step; NaN where a step is missing or recorded twice."""
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if not record.get("evaluation")]
    if [record["step"] for record in steps] != list(range(1, len(steps) + 1)):
        return [torch.nan] * len(steps)
    return [record["loss"] for record in steps]


class _Kill:
    def __init__(self, step: int | None, said: _Said) -> None:
        self.step, self.said = step, said

    def on_step(self, record: Any) -> None:
        if record.step == self.step:
            self.said.write("killed")
            os.kill(os.getpid(), signal.SIGKILL)


def _train(
    program: Program,
    layout: str,
    first: int | None,
    last: int | None,
    folder: Path,
    notes: Path,
    fault: Callable[[], None] | None,
) -> None:
    said = _Said(notes)
    try:
        if fault is not None:
            fault()
        with said.listening():
            result = _result(program, layout, first, last, folder, said)
        if dist.rank() == 0:
            torch.save(result, notes / "result.pt")
    except PacelineError as error:
        (notes / f"refused-{dist.rank()}.json").write_text(json.dumps([[error.code, str(error)]]))
        raise
    except Exception:
        (notes / f"crash-{dist.rank()}.json").write_text(json.dumps([[time.time(), traceback.format_exc()]]))
        raise
    finally:
        said.write("said")


def _result(program: Program, layout: str, first: int | None, last: int | None, folder: Path, said: _Said) -> Result:
    model = program.build_model()
    if program.loop == "adversarial":
        return _adversarial(program, layout, model)
    part = parts.LOSSES[program.loss]
    criterion = part.criterion() if part.criterion else None
    optimizer = parts.OPTIMIZERS[program.optimizer].build(trained_together(model, criterion))
    interval, build = parts.SCHEDULERS.get(program.scheduler or "", ("epoch", lambda optimizer: None))
    callbacks = [said] + ([parts.CALLBACKS[program.callback].build(model)] if program.callback else [])
    callbacks += [_Kill(last, said)] if program.killed else []
    trained = program.loop not in CUSTOM_LOOPS
    trainer = paceline.Trainer(
        model,
        optimizer,
        loss_fn=part.function,
        criterion=criterion,
        scheduler=build(optimizer),
        scheduler_interval=interval,
        callbacks=callbacks,
        metrics=parts.METRICS if with_metrics(program) else None,
        device="cpu",
        log_every=1,
        run=str(folder / "run") if program.stop is not None and trained else False,
        resume="auto" if program.stop is not None and trained else None,
        quiet=True,
        **program.settings(layout),
    )
    data = program.dataset()
    if program.loop == "steps":
        trainer.train(data, max_steps=STEPS if last is None or program.killed else last)
    elif program.loop == "epochs" and last is not None and not program.killed:
        trainer.train(data, epochs=EPOCHS, max_steps=last)
    elif program.loop == "epochs":
        trainer.train(data, epochs=EPOCHS)
    else:
        _custom_loop(program, trainer, data, first, last, folder / "custom")
    weights = {name: weight.clone() for name, weight in trainer.state_dict().items()}  # an evaluation may change them
    evaluation = {} if last is not None else dict(trainer.evaluate(program.validation()).values)
    return Result(said.losses, weights, evaluation)


def _custom_loop(
    program: Program, trainer: Any, data: Any, first: int | None, last: int | None, checkpoint: Path
) -> None:
    if first is not None:
        trainer.load_checkpoint(checkpoint)
    for epoch in range(trainer.epoch, EPOCHS):
        _set_epoch(data, epoch)
        for batch in trainer.loader(data):
            if program.loop == "training-step":
                trainer.training_step(batch)
            elif program.loop == "forward-backward":
                trainer.backward(trainer.forward(batch))
                trainer.step()
            else:  # beside the Trainer
                trainer.optimizer.zero_grad()
                make = parts.LOSSES[program.loss].criterion
                loss_of(program, trainer.model, batch, make().double() if make else None).backward()
                trainer.optimizer.step()
            if trainer.step_count == last:
                trainer.save_checkpoint(checkpoint)
                return


def _adversarial(program: Program, layout: str, judge: Any) -> Result:
    maker = generator()
    settings = {**program.settings(layout), "run": False, "quiet": True, "device": "cpu"}
    ours = paceline.Trainer(
        judge,
        torch.optim.SGD(judge.parameters(), lr=0.1),
        loss_fn=lambda model, batch: judge_loss(model, maker, parts.pair(batch)),
        **settings,
    )
    theirs = paceline.Trainer(
        maker,
        torch.optim.SGD(maker.parameters(), lr=0.1),
        loss_fn=lambda model, batch: maker_loss(judge, model, parts.pair(batch)),
        **settings,
    )
    data = program.dataset()
    for epoch in range(EPOCHS):
        _set_epoch(data, epoch)
        for batch in ours.loader(data):
            ours.training_step(batch)
            theirs.training_step(batch)
    made = {f"maker.{name}": weight for name, weight in theirs.state_dict().items()}
    return Result([], {**ours.state_dict(), **made}, {})


def _set_epoch(data: Any, epoch: int) -> None:
    """In a loop of one's own, as in torch."""
    if hasattr(getattr(data, "dataset", None), "set_epoch"):
        data.dataset.set_epoch(epoch)


def _read(notes: Path, kind: str) -> list[Any]:
    return [line for path in sorted(notes.glob(f"{kind}-*.json")) for line in json.loads(path.read_text())]


def _failed(program: Program, notes: Path, failure: RankFailure) -> Outcome:
    refused, crashed = _read(notes, "refused"), _read(notes, "crash")
    if refused:  # other ranks may fail as a consequence
        code, text = refused[0]
        # Only by torch 2.11, where FSDP2 lacks a setting.
        may = program.odd or code == "layout.unused-needs-newer-torch"
        return Outcome(program, "refused" if may else "false alarm", f"{code}: {text}")
    if crashed:
        return Outcome(program, "crash", min(crashed)[1])  # the others are consequences
    return Outcome(program, "hang", str(failure))


def _compared(program: Program, expected: Result, got: Result, said: list[tuple[str, bool]]) -> Outcome:
    trained, where = _training_difference(program, expected, got)
    if (
        program.loss in ("contrastive", "summed", "two-means", "multi-task", "late-weights", "dice")
        and LAYOUTS[program.layout_after or program.layout][0] * program.groups == 1
    ):
        expected.evaluation.clear()  # training does not slice batches, and evaluations in batches are not one
    evaluated = max(
        (_apart(value, got.evaluation.get(name, torch.inf)) for name, value in expected.evaluation.items()), default=0.0
    )
    # How long reading takes depends on the machine and its load, not on whether results are right.
    said = [each for each in said if "training waits" not in each[0] and "slower than the others" not in each[0]]
    before = [line for line, stepped in said if not stepped]
    lines = [line for line, _ in said]
    worst = max(trained, evaluated)
    if worst <= program.bound:
        if lines and not program.odd:
            return Outcome(program, "false alarm", lines[0], worst)
        return Outcome(program, "same", lines[0] if lines else "", worst)
    if trained > program.bound and not before:
        return Outcome(program, "late" if lines else "silent", lines[0] if lines else where, trained)
    if not lines:
        return Outcome(program, "silent", f"evaluation {expected.evaluation} {got.evaluation}", evaluated)
    return Outcome(program, "warned" if program.odd else "false alarm", lines[0], worst)


def _apart(a: float, b: float) -> float:
    return 0.0 if a == b or (a != a and b != b) else abs(a - b) / max(abs(a), 1e-3)


def _training_difference(program: Program, expected: Result, got: Result) -> tuple[float, str]:
    worst, where = 0.0, ""
    if program.loop not in ("own-optimizer", "adversarial"):
        if len(expected.losses) != len(got.losses):
            return torch.inf, f"{len(got.losses)} steps instead of {len(expected.losses)}"
        for step, (a, b) in enumerate(zip(expected.losses, got.losses, strict=True), start=1):
            if _apart(a, b) > program.bound and not where:
                where = f"loss of step {step}: {a:.9g} in one process, {b:.9g} here"
            worst = max(worst, _apart(a, b))
    for name, weight in expected.weights.items():
        other = got.weights.get(name)
        if other is None:
            return torch.inf, f"{name} is missing"
        far = ((weight - other).abs().max() / weight.abs().max().clamp(min=1e-3)).item()
        far = torch.inf if far != far else far
        if far > program.bound and not where:
            where = f"{name} differs by {far:.1e}"
        worst = max(worst, far)
    return worst, where
