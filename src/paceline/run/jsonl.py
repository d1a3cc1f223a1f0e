"""A buffered writer of JSON lines, for the metrics of a run and the statistics of its ranks.

The file stays open, and records reach the operating system within a tenth of a second: immediately if log points are
further apart than that. A killed rank loses nothing that was written before. NaN and infinity, which JSON can't
represent, become null.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from paceline.run import regular_files
from paceline.run.folder import not_usable

# Raises on NaN, so that only records that contain one pay for the search.
_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode
_NUMBERS = {int, float}

# With 0.4 ms steps and a log point every ten steps, writing at each log point cost 5 % of the time.
SECONDS_BETWEEN_WRITES = 0.1


class JsonlWriter:
    """`recreate` is called when the file, and with it maybe its folder, has disappeared."""

    def __init__(self, path: Path, recreate: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._recreate = recreate
        self._file: int | None = None
        self._held: list[Mapping[str, Any]] = []
        self._next = 0.0
        self._templates: dict[tuple[str, ...], str] = {}  # by the names in a record

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._held.extend(records)
        if time.monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Pass buffered records to the operating system. On failure they stay buffered."""
        if not self._held and self._file is None:
            return
        self._next = time.monotonic() + SECONDS_BETWEEN_WRITES
        lines = "".join([self._lines(names, list(alike)) for names, alike in groupby(self._held, key=tuple)])
        try:
            if self._file is None:
                self._file = _open(self.path)
            elif not _is_at(self._file, self.path):
                self._file = self._open_again(self._file)
            _write_all(self._file, lines.encode())
        except OSError as error:
            raise not_usable(self.path.parent, error.strerror or str(error)) from error
        self._held = []

    def _open_again(self, lost: int) -> int:
        """Open the file that is at the path now; if there is none, create it with what was written until now."""
        if self.path.exists():  # replaced, for example by an editor
            os.close(lost)
            return _open(self.path)
        self._recreate()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        again = _open(self.path)
        _write_all(again, os.pread(lost, os.fstat(lost).st_size, 0))
        os.close(lost)
        return again

    def _lines(self, names: tuple[str, ...], records: list[Mapping[str, Any]]) -> str:
        """Most records are a few finite numbers under the same names: formatting those with one template is much
        cheaper than the JSON encoder."""
        numbers = tuple(chain.from_iterable([record.values() for record in records]))
        if not (set(map(type, numbers)) <= _NUMBERS and all(map(math.isfinite, numbers))):
            return "".join([_line(record) for record in records])
        template = self._templates.get(names)
        if template is None:
            pairs = [_encode(name).replace("%", "%%") + ": %r" for name in names]
            template = self._templates[names] = "{" + ", ".join(pairs) + "}\n"
        return template * len(records) % numbers

    def close(self) -> None:
        """Write buffered records and close the file. A later append opens it again."""
        try:
            self.flush()
        finally:
            if self._file is not None:
                os.close(self._file)
                self._file = None


def _open(path: Path) -> int:
    file = regular_files.open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":  # a partial line of a killed writer must not corrupt the next
        os.write(file, b"\n")
    return file


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _write_all(file: int, content: bytes) -> None:
    """All or nothing: a disk may be full in the middle of a line."""
    size, written = os.fstat(file).st_size if content else 0, 0
    try:
        while written < len(content):
            written += os.write(file, content[written:])
    except OSError:
        os.ftruncate(file, size)
        raise


def truncate_after(path: Path, step: int) -> int:
    """Remove the records of steps after `step`, which a run resumed from there writes again; returns how many.

    Partial lines of a killed writer are removed too. The file is replaced atomically.
    """
    if not path.exists():
        return 0
    lines = list(_readable(path))
    kept = [line for line, record in lines if record.get("step", 0) <= step]
    with regular_files.replacing(path) as partial, partial.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    return len(lines) - len(kept)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, without partial lines of a killed writer."""
    return (record for _, record in _readable(path)) if path.exists() else iter(())


def _readable(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    with os.fdopen(regular_files.open_descriptor(path), "rb") as file:
        for line in file:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield line if line.endswith(b"\n") else line + b"\n", record


def _line(record: Mapping[str, Any]) -> str:
    try:
        return _encode(record) + "\n"
    except ValueError:
        return _encode(_finite(record)) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
