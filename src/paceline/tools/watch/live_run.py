"""A run that is followed: what is on disk about it, kept up to date by reading only what was appended.

    run = LiveRun(folder)
    run.update()          # in a moment, whatever the size of the files
    run.facts, run.statistics, run.is_complete

Of a large metrics file, the end is read at once, and all of it by a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from paceline.run.folder import RunFolder
from paceline.run.jsonl import RecordStream
from paceline.tools.watch.metric_series import TAIL_BYTES, RunMetrics, read_metrics
from paceline.tools.watch.rank_statistics import RankStatistics
from paceline.tools.watch.run_facts import RunFacts, file_stamp, read_other_facts

_SECONDS_BETWEEN = 0.3  # several pages may ask at the same time
_LARGE = 4 << 20  # smaller metrics files are parsed in less than 0.2 s

Value = TypeVar("Value")


class LiveRun:
    """Methods may be called from any thread."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.statistics = RankStatistics(folder)
        self.is_complete = False  # whether all metrics were read; if not, only the last ones are there
        # Changes when metrics do not continue those before; not that of an earlier LiveRun of the same folder.
        self.generation = time.time_ns()
        self._metrics = RunMetrics()
        self._stream: RecordStream | None = None  # None: not read yet
        self._reading: threading.Thread | None = None
        self.lock = threading.RLock()
        self._statistics_lock = threading.Lock()  # of its own: many files take a moment
        self._updated = self._statistics_updated = 0.0
        self._facts: RunFacts | None = None
        self._kept: dict[str, tuple[Any, Any]] = {}

    @property
    def facts(self) -> RunFacts:
        if self._facts is None:
            self.update()
        assert self._facts is not None
        return self._facts

    @property
    def read_fraction(self) -> float:
        """Of the metrics file."""
        stream = self._stream
        return 1.0 if self.is_complete or stream is None or not stream.size else stream.offset / stream.size

    @property
    def points(self) -> int:
        """The number of values in memory."""
        return sum(map(len, (*self._metrics.series.values(), *self._metrics.evaluations.values())))

    def update(self) -> None:
        """Read what is new, unless that was done just now."""
        with self.lock:
            if time.monotonic() < self._updated + _SECONDS_BETWEEN:
                return
            self._update_metrics()
            self._facts = read_other_facts(self.folder, self._metrics)
            self._updated = time.monotonic()

    def kept(self, name: str, make: Callable[[], Value]) -> Value:
        """A value that is made again when the ledger, the checkpoints, the state or the files of ranks have changed."""
        with self.lock:
            folder = self.folder
            files = (folder.ledger, folder.checkpoints, folder.latest, folder.config, folder.environment, folder.logs)
            key = (self.facts.state, self.facts.problems, *map(file_stamp, files))
            if name not in self._kept or self._kept[name][0] != key:
                self._kept[name] = (key, make())
            value: Value = self._kept[name][1]
            return value

    @contextmanager
    def updated_statistics(self) -> Iterator[RankStatistics]:
        with self._statistics_lock:
            if time.monotonic() >= self._statistics_updated + _SECONDS_BETWEEN:
                self.statistics.update()
                self._statistics_updated = time.monotonic()
            yield self.statistics

    def read_everything(self) -> None:
        """Wait until all metrics were read."""
        self.update()
        reading = self._reading
        if reading is not None:
            reading.join()
        self._updated = 0.0
        self.update()

    def _update_metrics(self) -> None:
        if self._stream is not None and self._stream.was_replaced() and self._reading is None:
            self._stream, self.is_complete = None, False
        if self._stream is None:
            self._open()
        elif self.is_complete:
            rewinds = self._metrics.rewinds
            self._metrics.extend(self._stream)
            self.generation += self._metrics.rewinds != rewinds

    def _open(self) -> None:
        self.generation += 1
        self._stream = RecordStream(self.folder.metrics)
        if file_stamp(self.folder.metrics)[1] < _LARGE:
            self._metrics = RunMetrics()
            self._metrics.extend(self._stream)
            self.is_complete = True
        else:
            self._metrics = read_metrics(self.folder, TAIL_BYTES)
            self._reading = threading.Thread(target=self._read_all, args=(self._stream,), daemon=True)
            self._reading.start()

    def _read_all(self, stream: RecordStream) -> None:
        metrics = RunMetrics()
        metrics.extend(stream)
        with self.lock:
            self._metrics, self.is_complete, self._reading = metrics, True, None
            self.generation += 1
            self._updated = 0.0
