"""`metrics.jsonl`: one JSON object a line, appended at log points. Readers need nothing but this file.

The file stays open, and records reach the operating system within a tenth of a second of training: where log points are
further apart than that, at once. A rank that is killed loses nothing that was written before. JSON has no word for NaN
and infinity; they become null.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TextIO

# Refuses NaN, so that only a record that holds one pays for the search.
_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode


_NUMBERS = {int, float}


# With steps of 0.4 ms and a log point every ten, writing at each cost 5 % of the time.
SECONDS_BETWEEN_WRITES = 0.1


class JsonlWriter:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        self._held: list[Mapping[str, Any]] = []
        self._next = 0.0
        self._templates: dict[tuple[str, ...], str] = {}  # by a record's names

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._held.extend(records)
        if time.monotonic() >= self._next:
            self._write()

    def _write(self) -> None:
        if not self._held:
            return
        self._next = time.monotonic() + SECONDS_BETWEEN_WRITES
        lines = "".join([self._lines(names, list(alike)) for names, alike in groupby(self._held, key=tuple)])
        self._held = []
        if self._file is None:
            self._file = open_to_append(self.path)
        self._file.write(lines)
        self._file.flush()

    def _lines(self, names: tuple[str, ...], records: list[Mapping[str, Any]]) -> str:
        """Most records are a few finite numbers under the same names: those go through one template, all at once,
        which is much cheaper than the JSON encoder."""
        numbers = tuple(chain.from_iterable([record.values() for record in records]))
        if not (set(map(type, numbers)) <= _NUMBERS and all(map(math.isfinite, numbers))):
            return "".join([_line(record) for record in records])
        template = self._templates.get(names)
        if template is None:
            pairs = [_encode(name).replace("%", "%%") + ": %r" for name in names]
            template = self._templates[names] = "{" + ", ".join(pairs) + "}\n"
        return template * len(records) % numbers

    def close(self) -> None:
        """Can be called twice; an append afterwards opens the file again."""
        self._write()
        if self._file is not None:
            self._file.close()
            self._file = None


def forget_after(path: Path, step: int) -> int:
    """Drop the records of later steps, which a run that goes on from `step` will write again; how many those were.

    Half lines that a killed writer left go too. The file is written beside and renamed, so that it is never half there.
    """
    if not path.exists():
        return 0
    kept, gone = [], 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("step", 0) > step:
                gone += 1
            else:
                kept.append(line if line.endswith(b"\n") else line + b"\n")
    beside = path.with_name(f".{path.name}.partial")
    with beside.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    return gone


def open_to_append(path: Path) -> TextIO:
    """Open a file of lines. The half line that a killed writer left is ended, so that it spoils no other."""
    torn = False
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, 2)
            torn = file.read(1) != b"\n"
    lines = path.open("a", encoding="utf-8", newline="")
    if torn:
        lines.write("\n")
    return lines


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
