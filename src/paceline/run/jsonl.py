"""Files of JSON lines: the metrics of a run and the statistics of its ranks.

The file stays open, and records reach the operating system within a tenth of a second: immediately if log points are
further apart than that. A killed rank loses nothing that was written before. NaN and infinity, which JSON can't
represent, become null.

`RecordStream` reads such a file in pieces, whatever it contains, and later what was appended to it. It parses many
lines at a time (a million in about two seconds), does not hold very long lines in memory, and counts what it could not
read.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
                self._file = open_lines(self.path)
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
            return open_lines(self.path)
        self._recreate()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        again = open_lines(self.path)
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


def open_lines(path: Path) -> int:
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
    with os.fdopen(regular_files.open_descriptor(path), "rb") as file:
        found = [(line.removesuffix(b"\n") + b"\n", _parse(line)) for line in file]
    lines = [(line, record) for line, record in found if isinstance(record, dict)]
    kept = [line for line, record in lines if record.get("step", 0) <= step]
    with regular_files.replacing(path) as partial, partial.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    return len(lines) - len(kept)


def read(path: Path) -> Iterator[Record]:
    """The records of a file, without partial lines of a killed writer."""
    if path.exists():
        stream = RecordStream(path)
        yield from chain.from_iterable(stream)
        yield from stream.rest()


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


_PIECE = 1 << 20
_MAX_LINE = 1 << 18
_MAX_BYTES = 1 << 31

Record = dict[str, Any]


class RecordStream:
    """Iterating yields lists of records; iterating again, those that were appended since. A last line without a line
    break may still be written: it is left to the next iteration, or to `rest`. Of the file, the last `last_bytes` are
    read."""

    def __init__(self, path: Path, last_bytes: int = _MAX_BYTES) -> None:
        self._path, self._last_bytes = path, last_bytes
        self.name = path.name
        self._file: tuple[int, int] | None = None  # device and inode
        self._start_over()

    def _start_over(self) -> None:
        self.skipped_bytes = 0  # at the beginning of the file
        self.unreadable = 0  # lines
        self.offset = 0  # bytes that were read
        self.size = 0  # of the file when it was last opened
        self._rest = b""
        self._is_partial = False  # the first line, or the rest of one that is too long

    def was_replaced(self) -> bool:
        """Whether another file has its name now, or it lost what was read of it: a run that resumes from an earlier
        step rewrites its metrics."""
        try:
            found = os.lstat(self._path)
        except OSError:
            return self._file is not None
        return self._file is not None and ((found.st_dev, found.st_ino) != self._file or found.st_size < self.offset)

    def __iter__(self) -> Iterator[list[Record]]:
        with os.fdopen(regular_files.open_descriptor(self._path), "rb") as file:
            found = os.fstat(file.fileno())
            self.size = found.st_size
            if self._file is None:
                self._file = found.st_dev, found.st_ino
                self.offset = self.skipped_bytes = max(0, self.size - self._last_bytes)
                self._is_partial = self.skipped_bytes > 0
            file.seek(self.offset)
            while piece := file.read(_PIECE):
                yield self._parsed(self._lines(piece))

    def rest(self) -> list[Record]:
        """The record in a last line without a line break, if it is complete."""
        lines, self._rest = [] if self._is_partial else [self._rest], b""
        return self._parsed(lines)

    def _lines(self, piece: bytes) -> list[bytes]:
        self.offset += len(piece)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if self._is_partial and lines:
            del lines[0]
            self._is_partial = False
        if len(self._rest) > _MAX_LINE:
            self.unreadable += not self._is_partial
            self._rest, self._is_partial = b"", True
        return lines

    def _parsed(self, lines: list[bytes]) -> list[Record]:
        lines = [line for line in lines if line.strip()]
        records = parse_lines(lines)
        self.unreadable += len(lines) - len(records)
        return records


def parse_lines(lines: list[bytes]) -> list[Record]:
    """The records in lines that are not empty; what is not a record is left out."""
    found = _parse(b"[" + b",".join(lines) + b"]")
    if not isinstance(found, list) or len(found) != len(lines):  # one of them is not JSON
        found = [_parse(line) for line in lines]
    return [record for record in found if type(record) is dict]


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
