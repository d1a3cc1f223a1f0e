"""Read a file of JSON lines in pieces, whatever it contains, and later what was appended to it.

Unlike run/jsonl.py, which writers use, this parses many lines at a time (a million in about two seconds), does not hold
very long lines in memory, and counts what it could not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.run import regular_files

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
            self.size = os.fstat(file.fileno()).st_size
            if self._file is None:
                self._file = _identity(file.fileno())
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
        found = _parse(b"[" + b",".join(lines) + b"]")
        if not isinstance(found, list) or len(found) != len(lines):  # one of them is not JSON
            found = [_parse(line) for line in lines]
        records = [record for record in found if type(record) is dict]
        self.unreadable += len(lines) - len(records)
        return records


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
