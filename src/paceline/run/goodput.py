"""Where the time of a run went, computed from its ledger.

print(summarize(folder).table())

    effective training time: 91.3 % of 12 min 4 s
      start 2.1 s, rendezvous 0.4 s, load 0.8 s, first step 1.2 s, saves 3.0 s, lost and replayed 8.2 s (12 steps)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.run import ledger
from paceline.run.folder import RunFolder


@dataclass
class Goodput:
    """Seconds of each kind, which add up to `total`."""

    start: float = 0.0
    rendezvous: float = 0.0
    load: float = 0.0
    compile: float = 0.0  # what first steps took beyond a usual one
    training: float = 0.0  # steps that counted
    evaluation: float = 0.0
    saves: float = 0.0
    lost: float = 0.0  # steps that a failure undid
    down: float = 0.0  # from a failure to the next start
    end: float = 0.0  # after the last step
    lost_steps: int = 0
    steps: int = 0  # that counted

    @property
    def total(self) -> float:
        return self.training + float(sum(getattr(self, name) for name in _LABELS))

    @property
    def effective(self) -> float:
        """The part of the time in which steps were trained that counted."""
        return self.training / self.total if self.total else 0.0

    def line(self) -> str:
        return f"effective training time: {self.effective:.1%} of {duration(self.total)}".replace("%", " %")

    def table(self) -> str:
        """The line, and what the rest of the time was; what is shorter than a twentieth of a second is left out."""
        parts = []
        for field in fields(self):
            seconds = getattr(self, field.name)
            if field.name in _LABELS and seconds >= 0.05:
                steps = f" ({self.lost_steps} step{'s' * (self.lost_steps != 1)})" if field.name == "lost" else ""
                parts.append(f"{_LABELS[field.name]} {duration(seconds)}{steps}")
        return "\n  ".join([self.line(), *([", ".join(parts)] if parts else [])])


_LABELS = {
    "start": "start", "rendezvous": "rendezvous", "load": "load", "compile": "first step", "evaluation": "evaluation",
    "saves": "saves", "lost": "lost and replayed", "down": "down", "end": "end",
}  # fmt: skip


def duration(seconds: float) -> str:
    """As a person would say it."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def summarize(folder: RunFolder) -> Goodput:
    """Add up all events in the ledger. Time between two runs (a resume days later) is not counted."""
    reader = _Reader()
    for event in ledger.events(folder):
        reader.take(str(event["event"]), float(event["time"]), event)
    return reader.result()


@dataclass
class _Piece:
    """Steps that were trained one after another, in so many seconds."""

    first: int  # steps done before it
    last: int
    seconds: float
    is_first: bool = False  # of a call of train()
    is_lost: bool = False  # as a whole
    lost_steps: int = 0

    @property
    def steps(self) -> int:
        return self.last - self.first


_SECONDS_OF = {  # events that say how long something took, and what that was
    "joined": "rendezvous", "restored": "load", "saved": "saves", "save-failed": "saves", "evaluated": "evaluation",
}  # fmt: skip


class _Reader:
    """Goes through the events once. `_state` is what the time up to the next event is spent on."""

    def __init__(self) -> None:
        self._sums = Goodput()
        self._pieces: list[_Piece] = []
        self._settled = 0  # pieces that no later failure can undo
        self._state = "start"
        self._last: float | None = None
        self._step = 0
        self._saved = 0  # done for certain, perhaps further than the last step that was noted
        self._window = 0.0  # seconds since `_step` was reached; of them, some were no training
        self._aside = 0.0

    def take(self, event: str, now: float, values: Mapping[str, Any]) -> None:
        if event == "launched":
            self._close_piece(self._saved, lost=True)
            self._state, self._aside = "down", 0.0
        new_run = event == "launched" and (not values.get("generation") or bool(values.get("resumed")))
        passed = 0.0 if self._last is None or new_run else max(0.0, now - self._last)
        self._last = now
        if event in _SECONDS_OF:
            passed = self._spend(_SECONDS_OF[event], _number(values, "seconds"), passed)
        elif event == "first-step":
            passed = self._begin(values, passed)
        self._pass(passed)
        if event in ("launched", "ranks-started", "joined") and self._state == "down":
            self._state = "start"
        elif event == "restored" and self._state == "training":  # a training that goes back by itself
            self._go_back(int(_number(values, "step")))
        elif event == "saved":
            self._saved = max(self._saved, int(_number(values, "step")))
        elif event in ("stepped", "finished", "failed", "ended"):
            self._reach(event, values)

    def _pass(self, seconds: float) -> None:
        if self._state == "training":
            self._window += seconds
        else:
            setattr(self._sums, self._state, getattr(self._sums, self._state) + seconds)

    def _spend(self, kind: str, seconds: float, passed: float) -> float:
        """Something took `seconds` until now; what is left of the time that passed. A save in the background holds
        training up at its beginning already, before another event."""
        if self._state == "training":
            self._aside += seconds
        else:
            seconds = min(seconds, passed)
            passed -= seconds
        setattr(self._sums, kind, getattr(self._sums, kind) + seconds)
        return passed

    def _begin(self, values: Mapping[str, Any], passed: float) -> float:
        """The first steps of a call of train(). What was trained beyond its beginning is lost."""
        step, seconds = int(_number(values, "step")), min(_number(values, "seconds"), passed)
        self._pass(passed - seconds)
        self._close_piece(self._saved, lost=True)
        self._go_back(step - int(_number(values, "steps") or 1))
        self._pieces.append(_Piece(self._step, step, seconds, is_first=True))
        self._state, self._step = "training", step
        return 0.0

    def _go_back(self, step: int) -> None:
        for piece in self._pieces[self._settled :]:
            piece.lost_steps = max(piece.lost_steps, min(piece.steps, piece.last - step))
        self._step = self._saved = step

    def _reach(self, event: str, values: Mapping[str, Any]) -> None:
        step = int(_number(values, "step"))
        if self._state == "training":
            self._close_piece(max(step, self._saved), lost=event == "failed")
        elif event == "stepped":  # nobody said when it began
            self._state, self._step = "training", step
        if event == "failed":
            self._state = "down"
        elif event in ("finished", "ended"):
            self._state = "end"
        if event == "finished":
            self._settled = len(self._pieces)

    def _close_piece(self, step: int, *, lost: bool) -> None:
        """The steps since the last one that is known. Without any, it was a part of one."""
        step = max(step, self._step)
        seconds = self._window - self._aside
        self._aside = max(0.0, -seconds)
        if seconds > 0 or step > self._step:
            is_lost = lost and step == self._step
            self._pieces.append(_Piece(self._step, step, max(0.0, seconds), is_lost=is_lost))
        self._window, self._step = 0.0, step

    def result(self) -> Goodput:
        self._close_piece(self._saved, lost=False)
        sums, whole = self._sums, [piece for piece in self._pieces if piece.steps and not piece.is_first]
        usual = sum(piece.seconds for piece in whole) / max(1, sum(piece.steps for piece in whole))
        for piece in self._pieces:
            seconds = min(piece.seconds, usual * piece.steps) if piece.is_first else piece.seconds
            sums.compile += piece.seconds - seconds
            part = piece.lost_steps / piece.steps if piece.steps else float(piece.is_lost)
            sums.lost += seconds * part
            sums.training += seconds * (1 - part)
            sums.lost_steps += piece.lost_steps
            sums.steps += piece.steps - piece.lost_steps
        return sums


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
