"""How long ranks may make no progress before it is reported: a limit for each phase, from the phase's own history.

    patience = ProgressLimits()
    patience.observe(time.monotonic(), {0: Observation("training", step=12, counters=(48, 0, 310)), ...})
    # None, or NoProgress(seconds=2.1, limit=2.0, why="20 × the median step of 0.1 s", phase="training")

    start, rendezvous       300 s
    load, first step        600 s: reads a checkpoint, compiles
    training                20 × the median step or, for long steps, the median + 60 s; 2 × the longest; at least 2 s
    saving                  10 × the longest pause of a save so far, at least 30 s
    evaluating              20 × the median pause between batches, 2 × the longest, at least 10 s
    in these three, if no rank waits in a collective or for its data
                            10 × their limit, at least 60 s: all ranks run code of the user that may take long
    exit                    60 s: ranks have ended, and those that are left neither compute nor do anything else
    without a Trainer       only if a rank waits in a collective: 20 × the median pause between collectives, 2 × the
                            longest wait, at least 10 s

Medians and longest values are of the last 50, so they follow a machine that becomes slower, and forget an outlier.
Time in which a rank could run but got no CPU does not count: on a machine under load, nothing of the run is stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import NamedTuple

from paceline.text import format_duration

_RECENT = 50
_FEW = 3  # below this many, history does not tell much
_LONGEST_PAUSE = 1.0  # between observations: whoever observes later was stopped, or starved like the ranks
_MOVES = 0.5  # seconds; a rank that has progressed within them does not wait for others
_BEHIND_OTHERS = 10  # times the limit, for a rank that waits while those that it may wait for make progress
_BUSY_ALIKE, _LEAST_ALIKE = 10, 60.0  # times the limit, and seconds, if nobody waits for others or for data
LASTING = 10  # times the limit, after which a standstill lasts: it is reported again, and then again
_FINISHED = "returned"
EXIT = "exit"  # of a rank that is not in a Trainer, and waits for no other, when ranks have ended
_FIXED = {"start": 300.0, "rendezvous": 300.0, "load": 600.0, "first step": 600.0, EXIT: 60.0}


class Observation(NamedTuple):
    """What a rank has done so far."""

    phase: str  # of its heartbeat; "" without a Trainer
    step: int = 0  # optimizer steps done
    counters: tuple[int, ...] = ()  # micro-batches, batches read, collectives: any change is progress
    waits: bool = False  # in an operation that other ranks take part in
    seems_to_wait: bool = False  # for other ranks or for its data, as its stack shows
    kept_waiting: float = 0.0  # seconds since its start in which its main thread could run, but others had the CPU


class NoProgress(NamedTuple):
    """A standstill that is to be reported."""

    seconds: float
    limit: float
    why: str  # "20 × the median step of 0.1 s"
    phase: str
    lasts: bool = False  # it was reported before


class Limit(NamedTuple):
    seconds: float
    why: str


@dataclass
class _Rank:
    last: Observation
    stood: float = 0.0


@dataclass
class _History:
    """Durations of one phase."""

    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    longest: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    number: int = 0  # of all so far

    def add(self, pause: float, longest: float, number: int = 1) -> None:
        self.pauses.extend([pause] * min(number, _RECENT))
        self.longest.append(longest)
        self.number += number


class ProgressLimits:
    """Watches ranks through observations that are made a few times a second, at times that are passed in."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._time: float | None = None
        self._histories: dict[str, _History] = {}
        self._phases: set[str] = set()  # of the last observation
        self._step: int | None = None  # that all ranks have done
        self._in_step = 0.0
        self._stands: NoProgress | None = None  # that was reported and has not ended
        self._reports = 0  # of it
        self._ended: float | None = None

    def observe(self, now: float, ranks: Mapping[int, Observation]) -> NoProgress | None:
        """A standstill, if one is to be reported now: when it exceeds its limit, and now and then while it lasts."""
        passed = 0.0 if self._time is None else min(now - self._time, _LONGEST_PAUSE)
        self._time = now
        left = {rank: seen for rank, seen in ranks.items() if seen.phase != _FINISHED}
        self._ranks = {rank: self._ranks.get(rank) or _Rank(seen) for rank, seen in left.items()}
        running = [seen for seen in left.values() if seen.phase != EXIT]
        self._learn_steps(passed, running)
        self._phases = {seen.phase for seen in running}
        self._follow(passed, left)
        found = self._worst() if running else self._unable_to_exit()
        if found is None:
            if self._stands is not None:
                self._ended = self._stands.seconds
            self._stands, self._reports = None, 0
            return None
        self._stands = found
        if self._reports and found.seconds <= self._reports * LASTING * found.limit:
            return None
        self._reports += 1
        return found._replace(lasts=self._reports > 1)

    def continued(self) -> float | None:
        """After how many seconds a standstill that was reported has ended; told once."""
        ended, self._ended = self._ended, None
        return ended

    def limit(self, phase: str) -> Limit:
        """How long ranks may make no progress in a phase."""
        if phase in _FIXED:
            return Limit(_FIXED[phase], f"fixed for the phase “{phase}”")
        return _LIMITS.get(phase, _pause_limit)(self._histories.get(phase, _History()))

    def _learn_steps(self, passed: float, ranks: list[Observation]) -> None:
        """Steps are counted by the slowest rank, and timed without saves and evaluations in between."""
        phases = {seen.phase for seen in ranks}
        step, before = min((seen.step for seen in ranks), default=0), self._step
        if phases == {"first step"}:
            self._step, self._in_step = step, 0.0
        if phases & {"saving", "evaluating"} or not phases & {"training"}:
            return
        self._in_step += passed
        if before is None and passed and "training" not in self._phases:
            # The first step began and ended between two observations, so steps are short.
            self._history("training").add(passed, passed, _FEW)
        if step != before and phases == {"training"}:
            if before is not None and step > before:
                self._history("training").add(self._in_step / (step - before), self._in_step, step - before)
            self._step, self._in_step = step, 0.0

    def _follow(self, passed: float, ranks: Mapping[int, Observation]) -> None:
        """Count for how long each rank has stood, and learn from those that continue."""
        pauses: dict[str, list[tuple[float, float]]] = {}
        for rank, seen in ranks.items():
            known = self._ranks[rank]
            stood = known.stood + max(0.0, passed - (seen.kept_waiting - known.last.kept_waiting))
            if seen[:3] == known.last[:3]:
                known.stood = stood
            else:
                phase = known.last.phase
                is_wait = phase in _LIMITS or known.last.waits
                pause = stood
                pauses.setdefault(phase, []).append((pause, pause if is_wait else 0.0))
                known.stood = 0.0
            known.last = seen
        for phase, found in pauses.items():
            if phase != "training":  # which learns from steps
                self._history(phase).add(*map(max, zip(*found, strict=True)))

    def _worst(self) -> NoProgress | None:
        """The standstill that exceeds its limit the most. A rank that waits depends on others: it counts if all of them
        wait, and if it waits for very long. One that others wait for may take as long as they may wait: all may have
        been busy alike before."""
        found = []
        ranks = [rank for rank in self._ranks.values() if rank.last.phase != EXIT]
        waiting = [rank.stood for rank in ranks if rank.last.waits and rank.stood > _MOVES]
        awaited, all_wait = max(waiting, default=0.0), len(waiting) == len(ranks)
        most = max((self.limit(rank.last.phase) for rank in ranks), default=Limit(0.0, ""))
        for rank in ranks:
            phase, stood = rank.last.phase, rank.stood
            limit, factor = self.limit(phase), 1
            if rank.last.waits:
                limit, factor = most, 1 if all_wait else _BEHIND_OTHERS
            elif awaited and not rank.last.seems_to_wait:
                stood = min(stood, awaited)
            elif phase in _LIMITS and not rank.last.seems_to_wait:
                limit = _limit_alike(limit)
            if stood > factor * limit.seconds and (awaited or phase in _FIXED or phase in _LIMITS):
                found.append(NoProgress(stood, limit.seconds, limit.why, phase))
        return max(found, key=lambda each: each.seconds / each.limit, default=None)

    def _unable_to_exit(self) -> NoProgress | None:
        """Of ranks that all should exit: one may compute for long after the others have ended."""
        stood, limit = min((rank.stood for rank in self._ranks.values()), default=0.0), self.limit(EXIT)
        return NoProgress(stood, limit.seconds, limit.why, EXIT) if stood > limit.seconds else None

    def _history(self, phase: str) -> _History:
        return self._histories.setdefault(phase, _History())


def _limit_alike(limit: Limit) -> Limit:
    why = "no rank waits for others or for data"
    return Limit(
        max(_BUSY_ALIKE * limit.seconds, _LEAST_ALIKE), f"{why}: {_BUSY_ALIKE} × the usual limit, at least 60 s"
    )


def _training_limit(history: _History) -> Limit:
    least = Limit(2.0, "at least 2 s")
    if history.number < _FEW:
        least = Limit(60.0, "at least 60 s in the first steps")
    if not history.pauses:
        return least
    step, longest = _median(history.pauses), max(history.longest)
    usual = min(
        Limit(20 * step, f"20 × the median step of {_seconds(step)}"),
        Limit(step + 60, f"the median step of {_seconds(step)} + 60 s"),
    )
    return max(least, usual, Limit(2 * longest, f"2 × the longest recent step of {_seconds(longest)}"))


def _saving_limit(history: _History) -> Limit:
    longest = max(history.longest, default=0.0)
    return max(Limit(30.0, "at least 30 s"), Limit(10 * longest, f"10 × the longest save of {_seconds(longest)}"))


def _pause_limit(history: _History, pause: str = "pause between collectives", longest: str = "wait") -> Limit:
    if history.number < _FEW:
        return max(Limit(30.0, "at least 30 s at the beginning"), _twice(max(history.longest, default=0.0), longest))
    usual = _median(history.pauses)
    return max(
        Limit(10.0, "at least 10 s"),
        Limit(20 * usual, f"20 × the median {pause} of {_seconds(usual)}"),
        _twice(max(history.longest), longest),
    )


def _median(pauses: Sequence[float]) -> float:
    """The mean of the middle half. Observations cut time into pieces: steps of 0.1 s that are looked at every 0.25 s
    seem to take 0.08 s or 0.125 s, and the median itself would be one of the two."""
    rest = len(pauses) // 4
    return fmean(sorted(pauses)[rest : len(pauses) - rest])


def _twice(seconds: float, thing: str) -> Limit:
    return Limit(2 * seconds, f"2 × the longest recent {thing} of {_seconds(seconds)}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else format_duration(seconds)


_LIMITS: Mapping[str, Callable[[_History], Limit]] = {
    "training": _training_limit,
    "saving": _saving_limit,
    "evaluating": partial(_pause_limit, pause="pause between batches", longest="pause"),
}
