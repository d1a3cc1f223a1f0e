"""Metrics that were read once, kept in the user's cache: opening a long run again takes a tenth of a second.

An index is a file per run, in `$XDG_CACHE_HOME/paceline/runs`. It holds the series, and how much of the metrics file
they come from; the rest is read from there on. Nothing is written to the run folder, which may be read-only, belong to
somebody else, or be compared by its hashes.

The file is a line of JSON, followed by the arrays of all series: numbers only, in the byte order of the machine. One
that does not fit the metrics file, or is damaged, is ignored and written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.watch.metric_series import MetricSeries, RunMetrics
from paceline.watch.record_stream import RecordStream

WORTH_BYTES = 4 << 20  # smaller metrics files are parsed in less than 0.2 s
_FORMAT = 1
_SAMPLE = 4096
_MAX_HEADER = 1 << 16
_MAX_INDEXES = 50


def load(folder: RunFolder) -> tuple[RunMetrics, RecordStream] | None:
    """The metrics up to some step, and a stream that continues behind them; None if there is no index."""
    try:
        with os.fdopen(regular_files.open_descriptor(_path(folder)), "rb") as file:
            header = json.loads(file.readline(_MAX_HEADER))
            if header["fits"] != _fits(folder, header["bytes"]):
                return None
            metrics = RunMetrics(epoch=header["epoch"], without_step=header["without_step"])
            for kind, name, count in header["series"]:
                series = MetricSeries(_read("q", count, file), _read("d", count, file))
                (metrics.evaluations if kind == "evaluation" else metrics.series)[name] = series
        stream = RecordStream(folder.metrics)
        stream.seek(header["bytes"], header["unreadable"])
        return metrics, stream
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def store(folder: RunFolder, metrics: RunMetrics, stream: RecordStream) -> None:
    """Write the index. Errors are ignored: without an index, the metrics are read again."""
    header: dict[str, Any] = {
        "bytes": stream.complete_bytes,
        "fits": _fits(folder, stream.complete_bytes),
        "unreadable": stream.unreadable,
        "without_step": metrics.without_step,
        "epoch": metrics.epoch,
        "series": [(kind, name, len(series)) for kind, name, series in _all_series(metrics)],
    }
    line = json.dumps(header).encode() + b"\n"
    if len(line) > _MAX_HEADER or stream.skipped_bytes:
        return
    with suppress(OSError):
        path = _path(folder)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with regular_files.replacing(path) as partial, partial.open("wb") as file:
            file.write(line)
            for _, _, series in _all_series(metrics):
                series.steps.tofile(file)
                series.values.tofile(file)
        _remove_oldest(path.parent)


def _all_series(metrics: RunMetrics) -> Iterator[tuple[str, str, MetricSeries]]:
    for kind, found in (("step", metrics.series), ("evaluation", metrics.evaluations)):
        for name, series in found.items():
            yield kind, name, series


def _read(kind: str, count: int, file: BinaryIO) -> array[Any]:
    values = array(kind)
    values.fromfile(file, count)
    return values


def _path(folder: RunFolder) -> Path:
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home, in a container
        raise OSError(str(error)) from None
    name = hashlib.sha256(os.fsencode(folder.metrics.resolve())).hexdigest()[:32]
    return Path(cache) / "paceline" / "runs" / f"{name}.index"


def _fits(folder: RunFolder, count: int) -> list[Any] | None:
    """What the first bytes of the metrics file must have in common with those that were indexed; None: it is shorter
    now. The last ones hold times, which differ if steps were trained again."""
    with os.fdopen(regular_files.open_descriptor(folder.metrics), "rb") as file:
        if os.fstat(file.fileno()).st_size < count:
            return None
        ends = [file.read(min(_SAMPLE, count))]
        file.seek(max(0, count - _SAMPLE))
        ends.append(file.read(count - file.tell()))
    return [_FORMAT, sys.byteorder, *(hashlib.sha256(end).hexdigest() for end in ends)]


def _remove_oldest(cache: Path) -> None:
    found = sorted(cache.glob("*.index"), key=lambda path: path.stat().st_mtime)
    for path in found[:-_MAX_INDEXES]:
        path.unlink(missing_ok=True)
