"""What a person sees while training runs: one live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class Standing:
    """Where training stands at a log point."""

    step: int
    epoch: int
    loss: float
    lr: float
    samples_per_second: float


class Display(Protocol):
    def __enter__(self) -> Display: ...
    def __exit__(self, *exc: object) -> None: ...
    def step(self, step: int) -> None: ...
    def show(self, standing: Standing) -> None: ...
    def note(self, text: str) -> None: ...


class Bar:
    """One line that moves."""

    def __init__(self, total: int | None, done: int) -> None:
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed}/{task.total}" if total else "{task.completed} steps"),
            TextColumn("loss {task.fields[loss]}  lr {task.fields[lr]}  {task.fields[rate]} samples/s"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(),
        )
        self._task = self._progress.add_task("", total=total, completed=done, epoch=1, loss="-", lr="-", rate="-")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def step(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def show(self, standing: Standing) -> None:
        self._progress.update(
            self._task,
            epoch=standing.epoch + 1,
            loss=f"{standing.loss:.4f}",
            lr=f"{standing.lr:.2e}",
            rate=f"{standing.samples_per_second:.0f}",
        )

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)


class Silent:
    """For ranks other than 0, and for those who asked for quiet."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def step(self, step: int) -> None:
        pass

    def show(self, standing: Standing) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class Lines(Silent):
    """A line at the first log point, then at most one every few seconds: a log file is read by people too."""

    SECONDS = 5.0

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._of = f"/{total}" if total else ""
        self._next = 0.0

    def show(self, standing: Standing) -> None:
        if time.monotonic() < self._next and standing.step != self._total:
            return
        self._next = time.monotonic() + self.SECONDS
        print(
            f"step {standing.step}{self._of}  epoch {standing.epoch + 1}  loss {standing.loss:.4f}  "
            f"lr {standing.lr:.2e}  {standing.samples_per_second:.0f} samples/s",
            flush=True,
        )

    def note(self, text: str) -> None:
        print(text, flush=True)


def choose_display(total: int | None, done: int, *, silent: bool) -> Display:
    if silent:
        return Silent()
    return Bar(total, done) if sys.stdout.isatty() else Lines(total)
