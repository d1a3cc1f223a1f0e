"""Goodput: where the time of a run went, computed from its ledger.

`summarize(folder).table()` reads

    time in training steps: 91.3 % of 12 min 4 s
      start 2.1 s, rendezvous 0.4 s, load 0.8 s, first step 1.2 s, saves 3.0 s, lost and replayed 8.2 s (12 steps)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.run import ledger
from paceline.run.folder import RunFolder
from paceline.text import format_duration, plural


@dataclass
class Goodput:
    """Seconds per activity; they add up to `total`."""

    start: float = 0.0
    rendezvous: float = 0.0
    load: float = 0.0
    compile: float = 0.0  # the time of first steps beyond that of an average step
    training: float = 0.0  # steps that were not lost
    waiting: float = 0.0  # for data
    evaluation: float = 0.0
    saves: float = 0.0
    hung: float = 0.0  # ranks made no progress, and a report said so
    unfinished: float = 0.0  # in the step in which training was interrupted
    lost: float = 0.0  # steps that a failure discarded
    down: float = 0.0  # from a failure to the restart
    end: float = 0.0  # after the last step
    lost_steps: int = 0
    steps: int = 0  # that were not lost

    @property
    def total(self) -> float:
        return self.training + float(sum(getattr(self, name) for name in LABELS))

    @property
    def effective(self) -> float:
        """The fraction of the time spent on steps that were not lost."""
        return self.training / self.total if self.total else 0.0

    def line(self) -> str:
        digits = ".1g" if 0 < self.effective < 0.0005 else ".1f"
        return f"time in training steps: {100 * self.effective:{digits}} % of {format_duration(self.total)}"

    def table(self) -> str:
        """The line, followed by the rest of the time; activities shorter than 0.05 s are omitted."""
        parts = []
        for field in fields(self):
            seconds = getattr(self, field.name)
            if field.name in LABELS and seconds >= 0.05:
                steps = f" ({plural(self.lost_steps, 'step')})" if field.name == "lost" else ""
                parts.append(f"{LABELS[field.name]} {format_duration(seconds)}{steps}")
        return "\n  ".join([self.line(), *([", ".join(parts)] if parts else [])])


LABELS = {  # of activities, except training
    "start": "start", "rendezvous": "rendezvous", "load": "load", "compile": "first step",
    "waiting": "waiting for data", "evaluation": "evaluation", "saves": "saves", "hung": "hung",
    "unfinished": "unfinished step", "lost": "lost and replayed", "down": "down", "end": "end",
}  # fmt: skip


def summarize(folder: RunFolder) -> Goodput:
    """Add up all events in the ledger. Time between two runs (a resume days later) is not counted."""
    accumulator = _Accumulator()
    for event in ledger.events(folder):
        accumulator.add(str(event["event"]), float(event["time"]), event)
    return accumulator.result()


@dataclass
class _Segment:
    """Consecutive steps and the seconds they took."""

    first: int  # steps completed before it
    last: int
    seconds: float
    is_first: bool = False  # of a call to train()
    is_lost: bool = False  # all of it, if it has no complete step
    lost_steps: int = 0
    is_cut: bool = False  # by an interrupt: what is beyond the usual time of its steps is that of an unfinished one

    @property
    def steps(self) -> int:
        return self.last - self.first


_SECONDS_OF = {  # events with a duration, and the activity that it counts for
    "joined": "rendezvous", "restored": "load", "saved": "saves", "save-failed": "saves", "evaluated": "evaluation",
    "hang": "hung", "continued": "hung",
}  # fmt: skip
_ENDS, _PROGRESS = ("failed", "ended", "rank-ended"), ("continued", "stepped", "first-step", "launched")


class _Accumulator:
    """Consumes the events in order. `_state` is the activity that the time up to the next event counts for."""

    def __init__(self) -> None:
        self._sums = Goodput()
        self._segments: list[_Segment] = []
        self._open: dict[int, list[_Segment]] = defaultdict(list)  # by trainer: those that a later failure may discard
        self._paused: dict[int, tuple[int, int]] = {}  # `_step` and `_saved` of the other trainers of the process
        self._trainer = 0
        self._state = "start"
        self._last: float | None = None
        self._step = 0
        self._saved = 0  # completed for certain, possibly more than the last event with a step says
        self._window = 0.0  # seconds since `_step` was reached; `_other` of them were not training
        self._other = 0.0
        self._hangs: list[tuple[float, float]] = []  # each with its begin and end
        self._is_hung = False  # since a report

    def add(self, event: str, now: float, values: Mapping[str, Any]) -> None:
        if event == "rank-ended" and values.get("rank"):  # the ledger is that of rank 0 and its launcher
            return
        if event == "launched":
            self._close_segment(self._saved, lost=True)
            self._state, self._other = "down", 0.0
        new_run = event == "launched" and (not values.get("generation") or bool(values.get("resumed")))
        elapsed = 0.0 if self._last is None or new_run else max(0.0, now - self._last)
        self._last = now
        self._switch(int(_number({"trainer": self._trainer, **values}, "trainer")))
        if event in _ENDS and self._is_hung:
            elapsed = self._spend("hung", elapsed, elapsed)
        self._is_hung = event == "hang" or (self._is_hung and event not in (*_ENDS, *_PROGRESS))
        if waited := _number(values, "waited"):
            elapsed = self._spend("waiting", min(waited, self._window + elapsed), elapsed)
        if event in _SECONDS_OF:
            elapsed = self._spend(_SECONDS_OF[event], _number(values, "seconds"), elapsed)
            if _SECONDS_OF[event] == "hung":
                self._hangs.append((now - _number(values, "seconds"), now))
        elif event == "first-step":
            elapsed = self._begin(values, elapsed)
        self._pass(elapsed)
        if event in ("launched", "ranks-started", "joined") and self._state == "down":
            self._state = "start"
        elif event == "restored" and self._state == "training":  # training itself returned to a checkpoint
            self._rewind(int(_number(values, "step")))
        elif event == "saved":
            self._saved = max(self._saved, int(_number(values, "step")))
        elif event in ("stepped", "finished", *_ENDS):
            self._reach(event, values)

    def _switch(self, trainer: int) -> None:
        """Several trainers of one process may take turns. Each has its own steps."""
        if trainer != self._trainer:
            self._close_segment(self._saved, lost=False)
            self._paused[self._trainer] = (self._step, self._saved)
            self._trainer = trainer
            self._step, self._saved = self._paused.get(trainer, (0, 0))

    def _pass(self, seconds: float) -> None:
        if self._state == "training":
            self._window += seconds
        else:
            setattr(self._sums, self._state, getattr(self._sums, self._state) + seconds)

    def _spend(self, kind: str, seconds: float, elapsed: float) -> float:
        """Count `seconds` for an activity that ended now; returns the rest of the elapsed time. A background save
        stalls training at its beginning, before other events."""
        if self._state == "training":
            seconds -= self._hung_in(seconds)
            self._other += seconds
        else:
            seconds = min(seconds, elapsed)
            elapsed -= seconds
        setattr(self._sums, kind, getattr(self._sums, kind) + seconds)
        return elapsed

    def _hung_in(self, seconds: float) -> float:
        """How much of an activity that ended now was counted as hung already."""
        assert self._last is not None
        began, now = self._last - seconds, self._last
        return sum(max(0.0, min(end, now) - max(start, began)) for start, end in self._hangs)

    def _begin(self, values: Mapping[str, Any], elapsed: float) -> float:
        """The first steps of a call to train(). Steps after its start that were completed earlier are lost."""
        step, seconds = int(_number(values, "step")), min(_number(values, "seconds"), elapsed)
        self._pass(elapsed - seconds)
        self._close_segment(self._saved, lost=bool(self._open[self._trainer]))
        self._rewind(step - int(_number(values, "steps") or 1))
        self._append(_Segment(self._step, step, seconds, is_first=True))
        self._state, self._step = "training", step
        return 0.0

    def _rewind(self, step: int) -> None:
        for segment in self._open[self._trainer]:
            segment.lost_steps = max(segment.lost_steps, min(segment.steps, segment.last - step))
        self._step = self._saved = step

    def _reach(self, event: str, values: Mapping[str, Any]) -> None:
        step = int(_number(values, "step"))
        has_failed = event == "failed" or (event == "rank-ended" and values.get("state") == "failed")
        if self._state == "training":
            is_cut = event in _ENDS and not has_failed and values.get("state") != "finished"
            self._close_segment(max(step, self._saved), lost=has_failed, cut=is_cut and values.get("status") != 0)
        elif event == "stepped":  # there was no event at its beginning
            self._state, self._step = "training", step
        if is_done := event == "finished" or values.get("state") == "finished":
            self._open[self._trainer].clear()
        if has_failed:
            self._state = "down"
        elif event == "ended" or (event == "rank-ended" and not is_done) or (is_done and not any(self._open.values())):
            self._state = "end"

    def _close_segment(self, step: int, *, lost: bool, cut: bool = False) -> None:
        """Close the segment since the last known step. Without a complete step, it was part of one."""
        step = max(step, self._step)
        seconds = self._window - self._other
        self._other = max(0.0, -seconds)
        if seconds > 0 or step > self._step:
            is_lost = lost and step == self._step
            self._append(_Segment(self._step, step, max(0.0, seconds), is_lost=is_lost, is_cut=cut))
        self._window, self._step = 0.0, step

    def _append(self, segment: _Segment) -> None:
        self._segments.append(segment)
        self._open[self._trainer].append(segment)

    def result(self) -> Goodput:
        self._close_segment(self._saved, lost=False)
        usual = [segment for segment in self._segments if segment.steps and not segment.is_first]
        sums, complete = self._sums, [segment for segment in usual if not segment.is_cut] or usual
        average = sum(segment.seconds for segment in complete) / max(1, sum(segment.steps for segment in complete))
        for segment in self._segments:
            seconds = min(segment.seconds, average * segment.steps) if segment.is_first else segment.seconds
            sums.compile += segment.seconds - seconds
            if segment.is_cut:
                seconds = min(segment.seconds, average * segment.steps)
                sums.unfinished += segment.seconds - seconds
            part = segment.lost_steps / segment.steps if segment.steps else float(segment.is_lost)
            sums.lost += seconds * part
            sums.training += seconds * (1 - part)
            sums.lost_steps += segment.lost_steps
            sums.steps += segment.steps - segment.lost_steps
        return sums


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0
