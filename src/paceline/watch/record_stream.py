"""Read a file of JSON lines once, in pieces, whatever it contains.

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
    """Iterating yields lists of records. Only the last `last_bytes` of the file are read."""

    def __init__(self, path: Path, last_bytes: int = _MAX_BYTES) -> None:
        self._path, self._last_bytes = path, last_bytes
        self.skipped_bytes = 0  # at the beginning of the file
        self.unreadable = 0  # lines

    def __iter__(self) -> Iterator[list[Record]]:
        with os.fdopen(regular_files.open_descriptor(self._path), "rb") as file:
            self.skipped_bytes = file.seek(max(0, os.fstat(file.fileno()).st_size - self._last_bytes))
            is_partial = self.skipped_bytes > 0  # the first line, or the rest of one that is too long
            rest = b""
            while piece := file.read(_PIECE):
                *lines, rest = (rest + piece).split(b"\n")
                if is_partial and lines:
                    del lines[0]
                    is_partial = False
                if len(rest) > _MAX_LINE:
                    self.unreadable += not is_partial
                    rest, is_partial = b"", True
                yield self._parsed(lines)
            yield self._parsed([] if is_partial else [rest])

    def _parsed(self, lines: list[bytes]) -> list[Record]:
        lines = [line for line in lines if line.strip()]
        found = _parse(b"[" + b",".join(lines) + b"]")
        if not isinstance(found, list) or len(found) != len(lines):  # one of them is not JSON
            found = [_parse(line) for line in lines]
        records = [record for record in found if type(record) is dict]
        self.unreadable += len(lines) - len(records)
        return records


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
