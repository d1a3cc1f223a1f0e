"""Whether training waits for data, and the number of workers that would be enough.

Workers read one batch each at a time. They keep up with training if `workers / reading time ≥ 1 / step time`, where the
step time is that of a step without waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.text import plural

NOTICEABLE = 0.1  # share of the time
WINDOW = 5.0  # seconds over which it is averaged
_MARGIN = 1.25  # reading times vary
_LEAST = 1e-3  # seconds to read a step's data; below, passing it between processes costs as much
_CHANGE = 2.0  # of the number of workers, or of the share, before it is said again
_STARTS = (
    "data: training waits {:.0%} of the time until {}, which every epoch starts anew, have read a first batch: "
    "persistent_workers=True of a DataLoader around a map-style dataset keeps them, and "
    'multiprocessing_context="fork" starts them faster than spawn'
)

Kind = Literal["dataset", "loader", "stream", "batches"]


@dataclass(frozen=True)
class InputSource:
    """Who reads the data, and what the user can change about it.

    dataset    `workers` of the Trainer; also for a stream that is split across ranks
    loader     `num_workers` of the user's DataLoader
    stream     an iterable dataset that is not split: at most one worker of every rank reads it
    batches    another iterable of batches, in the training process
    """

    kind: Kind
    workers: int = 0
    read: Callable[[], tuple[float, float]] | None = None  # seconds and micro-batches so far, measured in workers
    started: Callable[[], float] | None = None  # seconds so far in which training waited for new workers


@dataclass(frozen=True)
class Interval:
    """The time between two log points on one rank, in seconds."""

    seconds: float
    steps: int
    waited: float  # for data, on the host
    synchronized: float = 0.0  # of the time, for the device at the log point

    @property
    def data_wait(self) -> float:
        """The share of the time in which training waits for data.

        While the host waits, a GPU works on the steps in its queue. If data is late, the queue is empty before each
        step, and the time at the log point is what the device needs for a step beyond the host's part. Otherwise it is
        that of many steps, and the device has not waited."""
        if self.seconds <= 0.0:
            return 0.0
        busy = self.seconds - self.waited + (self.steps - 1) * self.synchronized
        return min(1.0, max(0.0, 1.0 - busy / self.seconds))


class ReadTime:
    """The seconds that reading the data of a step takes, at one process or worker."""

    def __init__(self, source: InputSource, groups: int) -> None:
        self._source, self._groups = source, groups
        self._before, self._last = (0.0, 0.0) if source.read is None else source.read(), 0.0
        self._started = 0.0

    def starting(self) -> float:
        """The seconds since the last call in which training waited for new workers."""
        before, self._started = self._started, 0.0 if self._source.started is None else self._source.started()
        return self._started - before

    def __call__(self, interval: Interval) -> float:
        """The mean of an interval. Where workers do not measure it, training waits because all of them are busy."""
        if self._source.read is not None:
            now = self._source.read()
            seconds, batches = now[0] - self._before[0], now[1] - self._before[1]
            self._before, self._last = now, seconds / batches * self._groups if batches else self._last
            return self._last
        if self._source.workers:
            return self._source.workers * interval.seconds / interval.steps
        return interval.waited / interval.steps


class InputMonitor:
    """Averages intervals. `cores` are those of this machine for each rank on it."""

    def __init__(self, source: InputSource, cores: int) -> None:
        self._source, self._cores = source, max(1, cores)
        self._warm = self._said_starts = False
        self._said: tuple[float, int] | None = None
        self._clear()

    def _clear(self) -> None:
        self._seconds = self._waited = self._reading = self._starting = 0.0
        self._steps = 0

    def add(self, seconds: float, steps: int, share: float, read: float, starting: float = 0.0) -> str | None:
        """Take an interval of the slowest rank, `starting` seconds of which went by until new workers had read a batch.
        Returns what to say: once, and again if it changes a lot. The first interval does not count: workers start."""
        if not self._warm:
            self._warm = True
            return None
        self._seconds += seconds
        self._steps += steps
        self._waited += share * seconds
        self._reading += read * steps
        self._starting += min(starting, share * seconds)
        if self._seconds < WINDOW:
            return None
        starts, rest = self._starting / self._seconds, self._seconds - self._starting
        mean, each = (self._waited - self._starting) / max(rest, 1e-6), (self._seconds - self._waited) / self._steps
        read = self._reading / self._steps
        self._clear()
        if starts >= NOTICEABLE and not self._said_starts:
            self._said_starts = True
            return _STARTS.format(starts, plural(self._source.workers, "worker"))
        if mean < NOTICEABLE or read < _LEAST or not self._is_news(mean, enough(read, each)):
            return None
        return advice(self._source, self._cores, mean, read, each)

    def _is_news(self, share: float, workers: int) -> bool:
        if self._said is not None:
            before, number = self._said
            if share < _CHANGE * before and number / _CHANGE <= workers <= number * _CHANGE:
                return False
        self._said = share, workers
        return True


def enough(read: float, step: float) -> int:
    """The workers that read a batch at least every `step` seconds, with a margin."""
    return max(1, math.ceil(round(_MARGIN * read / max(step, 1e-6), 6)))


def advice(source: InputSource, cores: int, share: float, read: float, step: float) -> str:
    """`read` and `step`: the seconds that reading the data of a step takes, and the rest of a step."""
    needed, workers = enough(read, step), source.workers
    seen, rest = f"data: training waits for data {share:.0%} of the time: ", f"the rest of a step {_seconds(step)}"
    if workers and needed <= workers and source.read is not None:
        return (
            f"{seen}{workers} workers read the data of a step in {_seconds(read)}, {rest}, so more of them will not "
            "help; passing batches to the training process takes the time (return fewer and smaller tensors: images as "
            "uint8), or other processes use the cores, or reading times vary (prefetch_factor of a DataLoader)"
        )
    where = ("in the training process", "in one worker", f"in each of {workers} workers")[min(workers, 2)]
    change = _change(source.kind, max(needed, workers + 1))
    limit = _limit(needed, cores, read, step)
    return f"{seen}reading takes {_seconds(read)} a step {where}, {rest}; {change} would be enough{limit}"


def _change(kind: Kind, needed: int) -> str:
    if kind == "dataset" or (kind == "stream" and needed == 1):
        return f"workers: {needed}"
    if kind == "loader":
        return f"num_workers={needed} of the DataLoader"
    if kind == "stream":
        return (
            "an iterable dataset that is not split has one reader: splitting it by rank and by get_worker_info(), with "
            f"data.sharded: true and workers: {needed},"
        )
    return f"a Dataset in place of the iterable, with workers: {needed}, or a DataLoader with num_workers={needed}"


def _limit(needed: int, cores: int, read: float, step: float) -> str:
    """What more workers than cores can do."""
    left = 1.0 - cores * step / read
    if needed <= cores or left < NOTICEABLE:
        return ""
    return (
        f", unless reading keeps the CPU busy: {plural(cores, 'core')} per rank would leave {left:.0%} of the time "
        "waiting, so make reading cheaper or prepare the data beforehand"
    )


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"
