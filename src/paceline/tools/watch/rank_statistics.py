"""What ranks wrote about themselves, as a table of ranks × time: throughput, data wait, memory, their own time.

Each rank has a file with a record per log point. Of long files, blocks at equal distances are read: a cell of the table
is the mean of the records that it has. Later, only what was appended is read.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.run.jsonl import Record, parse_lines
from paceline.text import plural
from paceline.tools.watch.metric_series import number, rounded

_MAX_RANKS = 4096
_MAX_RECORDS = 160_000  # of all ranks: 9 MB, and half a second
_MIN_RECORDS = 500  # of a rank
_RECORD_BYTES = 150
_BLOCK = 1 << 15
_NAMES = ("own_time", "slowdown", "data_wait", "memory", "samples_per_second")
_WIDTH = len(_NAMES) + 1  # and the utilization of the GPU
Rows = list[list[float | None]]


@dataclass
class _RankFile:
    """The records of one rank, in the order of their steps."""

    path: Path
    offset: int = 0
    inode: int = 0
    sampled: bool = False
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))  # a row of _WIDTH numbers for each step

    def update(self, most: int) -> bool:
        """Read what is new, about `most` records of it. Returns whether there was anything."""
        with os.fdopen(regular_files.open_descriptor(self.path), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self.inode or found.st_size < self.offset:
                self.offset, self.inode = 0, found.st_ino
                self._keep(slice(0))
            new = found.st_size - self.offset
            if not new:
                return False
            for start, end in self._blocks(new, most):
                file.seek(start)
                self._add(file.read(end - start), is_first=start == self.offset)
            file.seek(max(self.offset, found.st_size - _BLOCK))
            incomplete = len(file.read(_BLOCK).rpartition(b"\n")[2])
            self.offset = found.st_size - incomplete
        if len(self.steps) > 2 * most:
            self._keep(slice(None, None, 2))
        return True

    def _blocks(self, new: int, most: int) -> list[tuple[int, int]]:
        """The parts of the new bytes to read."""
        count = max(2, most * _RECORD_BYTES // _BLOCK)
        if new <= count * _BLOCK:
            return [(self.offset, self.offset + new)]
        self.sampled = True
        starts = [self.offset + (new - _BLOCK) * n // (count - 1) for n in range(count)]
        return [(start, start + _BLOCK) for start in starts]

    def _add(self, block: bytes, *, is_first: bool) -> None:
        lines = block.split(b"\n")[0 if is_first else 1 : -1]
        for record in parse_lines([line for line in lines if line.strip()]):
            step = record.get("step")
            if type(step) is not int or not 0 <= step < 1 << 53:
                continue
            if self.steps and self.steps[-1] >= step:  # a run that resumed from an earlier step
                self._keep(slice(bisect_left(self.steps, step)))
            self.steps.append(step)
            self.values.extend(_row(record))

    def _keep(self, rows: slice) -> None:
        columns = [self.values[n::_WIDTH][rows] for n in range(_WIDTH)]
        self.steps = self.steps[rows]
        self.values = array("d", (value for row in zip(*columns, strict=True) for value in row))


def _row(record: Record) -> tuple[float, ...]:
    gpu = record.get("gpu")
    utilization = gpu.get("utilization") if type(gpu) is dict else None
    own_time = record.get("own_time") or None  # zero: not known yet
    return (number(own_time), *(number(record.get(name)) for name in _NAMES[1:]), number(utilization))


class RankStatistics:
    """The files of all ranks of a run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._files: dict[int, _RankFile] = {}
        self.problems: list[str] = []
        self.version = 0  # changes with the data

    def update(self) -> None:
        self.problems = []
        parent = self._folder.rank_stats(0).parent
        paths = {} if parent.is_symlink() else self._folder.rank_stats.existing()
        most = max(_MIN_RECORDS, _MAX_RECORDS // max(1, len(paths)))
        unreadable = 0
        for rank in list(paths)[:_MAX_RANKS]:
            file = self._files.setdefault(rank, _RankFile(paths[rank]))
            try:
                self.version += file.update(most)
            except OSError:
                unreadable += 1
        if unreadable:
            self.problems.append(f"the statistics of {plural(unreadable, 'rank')} can't be read")

    @property
    def ranks(self) -> list[int]:
        return sorted(rank for rank, file in self._files.items() if file.steps)

    def table(self, columns: int, batch: int | None) -> dict[str, Any]:
        """Rows of ranks by name of a quantity; `steps` are those at which columns begin, and the end."""
        ranks = self.ranks
        ends = [self._files[rank].steps for rank in ranks]
        if not ranks:
            return {"ranks": [], "steps": [], "rows": {}, "sampled": False}
        low, high = min(steps[0] for steps in ends), max(steps[-1] for steps in ends)
        columns = max(1, min(columns, max(len(steps) for steps in ends)))
        edges = [low + (high + 1 - low) * n / columns for n in range(columns + 1)]
        rows = {name: [self._cells(rank, n, edges) for rank in ranks] for n, name in enumerate((*_NAMES, "gpu"))}
        rows["relative"] = _relative(rows["own_time"])
        rows["collectives"] = _waiting(rows, batch)
        known = {name: found for name, found in rows.items() if any(value for row in found for value in row)}
        shown = {
            name: [[value and rounded(value, 4) for value in row] for row in found] for name, found in known.items()
        }
        sampled = any(file.sampled for file in self._files.values())
        return {"ranks": ranks, "steps": edges, "rows": shown, "sampled": sampled}

    def _cells(self, rank: int, column: int, edges: Sequence[float]) -> list[float | None]:
        file = self._files[rank]
        bounds = [bisect_left(file.steps, edge) for edge in edges[:-1]] + [bisect_right(file.steps, edges[-1])]
        cells: list[float | None] = []
        for start, end in pairwise(bounds):
            found = [value for value in file.values[start * _WIDTH + column : end * _WIDTH : _WIDTH] if value == value]
            is_over = start >= len(file.steps)  # the rank wrote nothing after that
            cells.append(fmean(found) if found else cells[-1] if cells and not is_over else None)
        return cells


def _relative(own_time: Rows) -> Rows:
    """The own time of a rank in a step, as a multiple of the median of all ranks."""
    columns = [[value for value in column if value is not None] for column in zip(*own_time, strict=True)]
    middles = [median(column) if column else 0.0 for column in columns]
    return [
        [None if value is None else value / middles[n] if middles[n] > 0 else 1.0 for n, value in enumerate(row)]
        for row in own_time
    ]


def _waiting(rows: dict[str, Rows], batch: int | None) -> Rows:
    """The share of a step that a rank spends neither by itself nor waiting for data: in collectives that are not hidden
    behind its computation."""
    found: Rows = []
    for own, waits, speeds in zip(rows["own_time"], rows["data_wait"], rows["samples_per_second"], strict=True):
        cells: list[float | None] = []
        for busy, wait, speed in zip(own, waits, speeds, strict=True):
            if batch is None or wait is None or not busy or not speed:
                cells.append(None)
            else:
                cells.append(max(0.0, 1 - busy * speed / batch - wait))
        found.append(cells)
    return found
