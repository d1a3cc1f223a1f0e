"""Ranks that are slower than the others.

In a synchronous step all ranks take the same time: the fast ones wait for the slowest in a collective. So ranks compare
what each of them does by itself, from the end of one collective until it arrives at the next:

    CPU                 CPU time of the thread that trains, which waits in a collective without using any. The other
                        processes of a busy machine, which keep ranks from running now and then, do not count.
    GPU, replicated     time on the GPU between two backwards, by CUDA events that are read at log points: the forward,
                        the optimizer, and whatever the GPU waits for. DDP's collectives are in the backward.
    GPU, other layouts  only the wait for data: collectives are within the forward, where they can't be told apart.

Each rank sends summaries of its last steps in the reduction of a log point. A stall of a single step changes none of
them. A slow network delays all ranks alike and is not named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, median_low
from time import thread_time
from typing import Any, Literal

import torch

from paceline.text import plural

RECENT = 10  # steps that are compared
_SLOW = 1.5  # times the time of the others
_CALM = 1.25  # below, a slow rank has recovered
_LEAST = 5e-4  # seconds per step
_NOTICEABLE = 0.05  # share of a step
_RECOVERED = 2  # log points
LOST, SHARE = 1.0, 0.01  # least seconds that are worth a warning; at the end of training, also least share of its time
NUMBERS = 3  # that a rank sends

Kind = Literal["compute", "data"]
_DOES: dict[Kind, str] = {"compute": "computing", "data": "reading data"}


class BusyTime:
    """What this rank does by itself in each of its last steps, in seconds."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type != "cpu"
        self._busy: deque[float] = deque(maxlen=RECENT)
        self._waits: deque[float] = deque(maxlen=RECENT)
        self.middle = 0.0  # the median of the busy seconds at the last log point
        self._waited, self._cpu = 0.0, thread_time()
        self._events: deque[tuple[Any, Any]] = deque(maxlen=RECENT + 1)  # arrival at a collective, and its end
        self._open: tuple[Any, Any]  # of a backward that has not ended

    def stepped(self, waited: float) -> None:
        """A step ended. `waited`: seconds for data, since the last log point."""
        self._waits.append(waited - self._waited)
        self._waited = waited
        if not self._on_gpu:
            now = thread_time()
            self._busy.append(now - self._cpu)
            self._cpu = now

    def resume(self) -> None:
        """Training continues after a log point, or something else that is not part of a step."""
        self._cpu = thread_time()

    def arrived(self, micro: Any, value: Any) -> None:
        """Call before a backward on a GPU that waits for other ranks only at its end, if it is the last of its step."""
        if micro.last:
            full = len(self._events) == RECENT + 1
            events = self._events.popleft() if full else (_timer(), _timer())  # the oldest ones are recorded again
            events[0].record()
            self._open = events

    def left(self, micro: Any) -> None:
        """Call after that backward."""
        if micro.last:
            self._open[1].record()
            self._events.append(self._open)

    def numbers(self) -> list[float]:
        """Of the last steps: the busy seconds that four of five exceed, their median, and the mean wait for data,
        without the longest. Zeros: not known yet. Call at a log point, when the device has completed all steps."""
        self._waited = 0.0
        if self._events:
            self._busy.clear()
            for (_, left), (arrived, _) in pairwise(self._events):
                if arrived.query():
                    self._busy.append(left.elapsed_time(arrived) / 1e3)
        if len(self._waits) < RECENT:
            return [0.0] * NUMBERS
        busy = sorted(self._busy) or [0.0]
        self.middle = median(busy)
        return [busy[len(busy) // 5], self.middle, sum(sorted(self._waits)[:-1]) / (RECENT - 1)]


def _timer() -> Any:
    return torch.cuda.Event(enable_timing=True)


@dataclass(frozen=True)
class Slow:
    """A rank at a log point."""

    kind: Kind
    times: float  # the time of the others
    seconds: float  # per step, more than the others


def compare(own: Sequence[Sequence[float]], step: float, stages: int = 1, slow: float = _SLOW) -> dict[int, Slow]:
    """The ranks that take at least `slow` times as long as the median of the others, from the numbers of each rank and
    the seconds of a step. Pipeline stages have different work, so each has its own median; all of them read data."""
    if not all(any(numbers) for numbers in own):
        return {}
    size = len(own) // stages
    usual_wait = median_low([wait for _, _, wait in own])
    found = {}
    for rank, (low, _, wait) in enumerate(own):
        first = rank // size * size
        usual_busy = median_low([middle for _, middle, _ in own[first : first + size]])
        late, busy = wait - usual_wait, low - usual_busy
        excess = max(late, busy)
        usual = max(usual_busy, usual_wait) if usual_busy else max(step - excess, 0.0)
        if excess >= max(_LEAST, _NOTICEABLE * step, (slow - 1) * usual):
            found[rank] = Slow("data" if late >= busy / 2 else "compute", 1 + excess / max(usual, 1e-6), excess)
    return found


@dataclass
class _Straggler:
    since: int  # the first step
    kind: Kind
    times: float = 1.0
    calm: int = 0  # log points at which it was as fast as the others
    steps: int = 0
    lost: float = 0.0  # seconds that others waited
    named: bool = False  # in a warning


@dataclass
class Stragglers:
    """Follows slow ranks over log points. The same on every rank."""

    ranks: int
    stages: int
    warn: Callable[[str], None]
    current: dict[int, _Straggler] = field(default_factory=dict)
    _past: list[tuple[int, _Straggler]] = field(default_factory=list)
    _seconds: float = 0.0
    _steps: int = 0

    def log_point(self, numbers: Sequence[float], step: int, steps: int, seconds: float) -> None:
        """`numbers` of all ranks, after `step`, for an interval of so many steps and seconds."""
        self._seconds += seconds
        self._steps += steps
        own = [numbers[rank * NUMBERS : (rank + 1) * NUMBERS] for rank in range(self.ranks)]
        still = compare(own, seconds / steps, self.stages, _CALM)
        for rank, found in compare(own, seconds / steps, self.stages).items():
            self.current.setdefault(rank, _Straggler(max(1, step - RECENT + 1), found.kind))
        for rank, straggler in list(self.current.items()):
            if rank in still:
                straggler.calm, straggler.times = 0, still[rank].times
                straggler.steps += min(steps, step - straggler.since + 1)
                straggler.lost += still[rank].seconds * min(steps, step - straggler.since + 1)
                self._name(rank, straggler, still[rank])
            else:
                straggler.calm += 1
                if straggler.calm == _RECOVERED:
                    self._end(rank, step)

    def _name(self, rank: int, straggler: _Straggler, found: Slow) -> None:
        if not straggler.named and straggler.lost >= LOST:
            straggler.named = True
            self.warn(
                f"rank {rank} has been {found.times:.1f} × slower than the others since step {straggler.since}: "
                f"{_DOES[straggler.kind]} takes it {found.seconds * 1e3:.3g} ms longer in each step, and all ranks "
                f"have waited {straggler.lost:.1f} s for it"
            )

    def _end(self, rank: int, step: int) -> None:
        straggler = self.current.pop(rank)
        self._past.append((rank, straggler))
        if straggler.named:
            self.warn(f"rank {rank} is as fast as the others again (step {step})")

    def shown(self) -> str:
        """For the progress bar."""
        worst = sorted(self.current.items(), key=lambda item: -item[1].times)
        return ", ".join(f"rank {rank} {slow.times:.1f}× slower: {slow.kind}" for rank, slow in worst[:2])

    def values(self) -> dict[str, float]:
        """For the metrics: the slowest rank, while there is one."""
        rank = max(self.current, key=lambda rank: self.current[rank].times, default=None)
        return {} if rank is None else {"straggler": rank, "slowdown": round(self.current[rank].times, 2)}

    def finish(self) -> None:
        """Say at the end of training what slow ranks have cost."""
        by_rank: dict[int, list[_Straggler]] = {}
        for rank, straggler in (*self._past, *self.current.items()):
            by_rank.setdefault(rank, []).append(straggler)
        for rank, times in sorted(by_rank.items()):
            steps, lost = sum(each.steps for each in times), sum(each.lost for each in times)
            if lost < max(LOST, SHARE * self._seconds):
                continue
            kinds = " and ".join(sorted({_DOES[each.kind] for each in times}))
            self.warn(
                f"rank {rank} was slower than the others in {steps} of {plural(self._steps, 'step')}, {kinds}: "
                f"{lost / self._seconds:.0%} of the time of all ranks ({lost:.1f} s) was lost to it"
            )
