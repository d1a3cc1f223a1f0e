"""Progress of training: a live line in a terminal, plain lines otherwise.

The cost per training step is one assignment: the loop sets `display.completed`, which the thread of the bar reads four
times per second. Values that are expensive to compute (losses, rates) are updated at log points.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from paceline.log import Log
from paceline.text import format_bytes, format_clock, format_rate, format_sent, format_value


@dataclass(slots=True)
class LogPoint:
    """The values that are shown at a log point."""

    step: int
    epoch: int
    loss: float
    lr: float
    samples_per_second: float
    tokens_per_second: float | None = None
    data_wait: float = 0.0  # the fraction of the time since the last log point
    memory: int | None = None  # bytes
    extras: Mapping[str, float] = field(default_factory=dict)
    tflops: float | None = None  # per second and device
    mfu: float | None = None
    sent_mb: float | None = None  # per step and rank
    slow: str = ""  # the ranks that the others wait for


class Display:
    """Shows nothing: for ranks other than 0, and for `quiet: true`."""

    def __init__(self, total: int | None, done: int) -> None:
        self.completed = done
        self._pace = _Pace(total, done)

    def __enter__(self) -> Self:
        self._pace = _Pace(self._pace.total, self.completed)
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def show(self, point: LogPoint) -> None:
        pass


def choose_display(total: int | None, done: int, log: Log, *, silent: bool) -> Display:
    if silent:
        return Display(total, done)
    return Bar(total, done) if sys.stdout.isatty() else Lines(total, done, log)


class Lines(Display):
    """A line at the first and last log point, and at most one every few seconds in between."""

    SECONDS = 5.0

    def __init__(self, total: int | None, done: int, log: Log) -> None:
        super().__init__(total, done)
        self._log = log
        self._next = 0.0
        self._pending: LogPoint | None = None

    def __exit__(self, *exc: object) -> None:
        if self._pending is not None:
            self._print(self._pending)

    def show(self, point: LogPoint) -> None:
        if time.monotonic() < self._next and point.step != self._pace.total:
            self._pending = point
            return
        self._next = time.monotonic() + self.SECONDS
        self._print(point)

    def _print(self, point: LogPoint) -> None:
        self._pending = None
        facts = {"steps": f"step {self._pace.steps(point.step)}", **_facts(point)}
        if self._pace.total:
            facts["left"] = f"ETA {self._pace.left(point.step)}"
        self._log.info("  ".join(facts.values()))


class Bar(Display):
    """A live line. In a narrow terminal, the least important facts are omitted."""

    REFRESHES = 4.0  # per second
    WIDEST, NARROWEST = 30, 8
    # In the order of removal; logged values are removed before these, steps and loss never.
    DISPENSABLE = ("flops", "memory", "lr", "epoch", "sent", "wait", "bar", "rate", "slow", "left")

    def __init__(self, total: int | None, done: int, console: Console | None = None) -> None:
        super().__init__(total, done)
        self._point: LogPoint | None = None
        self._live = Live(self, console=console or Console(), refresh_per_second=self.REFRESHES)

    def __enter__(self) -> Self:
        super().__enter__()
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, point: LogPoint) -> None:
        self._point = point

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        completed = self.completed  # the loop may change it while this is drawn
        facts = self._fitting(completed, options.max_width)
        line = Text(no_wrap=True, overflow="crop", end="")
        for name, fact in facts.items():
            line.append("  " if line.plain else "")
            if name == "bar":
                room = options.max_width - sum(len(fact) + 2 for name, fact in facts.items() if name != "bar")
                line.append_text(self._drawn(completed, min(room, self.WIDEST), ascii_only=options.ascii_only))
            else:
                line.append(fact)
        yield line

    def _fitting(self, completed: int, width: int) -> dict[str, str]:
        facts = {"epoch": "", "bar": " " * self.NARROWEST, "steps": self._pace.steps(completed), "loss": "loss -"}
        facts |= _facts(self._point) if self._point else {}
        extras = facts.keys() - {"steps", "loss", *self.DISPENSABLE}
        facts["left"] = f"ETA {self._pace.left(completed)}"
        if not self._pace.total:
            del facts["bar"], facts["left"]
        facts = {name: fact for name, fact in facts.items() if fact}
        for name in (*sorted(extras, reverse=True), *self.DISPENSABLE):
            if sum(map(len, facts.values())) + 2 * (len(facts) - 1) <= width:
                break
            facts.pop(name, None)
        return facts

    def _drawn(self, completed: int, width: int, *, ascii_only: bool) -> Text:
        full = width * min(completed, self._pace.total or 1) // (self._pace.total or 1)
        done, open_ = ("#", ".") if ascii_only else ("━", "─")
        return Text.assemble((done * full, "green"), (open_ * (width - full), "bright_black"))


class _Pace:
    """The completed steps, and the remaining time at the speed since the display was opened."""

    def __init__(self, total: int | None, done: int) -> None:
        self.total = total
        self._done = done
        self._since = time.monotonic()

    def steps(self, completed: int) -> str:
        return f"{completed}/{self.total}" if self.total else f"{completed} steps"

    def left(self, completed: int) -> str:
        if not self.total or completed <= self._done:
            return "-"
        a_step = (time.monotonic() - self._since) / (completed - self._done)
        seconds = math.ceil(a_step * max(self.total - completed, 0))
        return format_clock(seconds)


def _facts(point: LogPoint) -> dict[str, str]:
    """The values of a log point as text, in the order of display."""
    tokens, samples = point.tokens_per_second, point.samples_per_second
    facts = {
        "epoch": f"epoch {point.epoch}",
        "loss": f"loss {format_value(point.loss)}",
        "lr": f"lr {point.lr:.3g}",
        "rate": f"{format_rate(samples)} samples/s" if tokens is None else f"{format_rate(tokens)} tokens/s",
        "wait": f"data wait {point.data_wait:.0%}",
    }
    if point.slow:
        facts["slow"] = point.slow
    if point.tflops is not None:
        facts["flops"] = f"{format_rate(point.tflops * 1e12)}FLOP/s" if point.mfu is None else f"MFU {point.mfu:.1%}"
    if point.sent_mb is not None:
        facts["sent"] = f"sent {format_sent(point.sent_mb * 1e6)}/step"
    if point.memory is not None:
        facts["memory"] = format_bytes(point.memory)
    return facts | {f"extra {name}": f"{name} {format_value(value)}" for name, value in point.extras.items()}
