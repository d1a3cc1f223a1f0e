"""The page of a rank: how far it has come, written four times a second by a thread of the rank (runtime/rank_watch.py).

    writer = RankPageWriter(folder.page(rank))       # in the rank
    writer.write({"pid": 4711, "micros": 12, ...})

    read_pages(folder)[0].micros                     # in the launcher

The file holds two copies, which are written in turn. A rank may be stopped or killed in the middle of a write: the
other copy is then still whole. It is written with `pwrite`, not mapped: a disk that is full is an error that can be
ignored, not a SIGBUS, and one that stalls blocks only the thread that writes, while a page fault would hold the GIL.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.run import regular_files
from paceline.run.folder import RunFolder

_COPY = 1 << 14
_HEAD = struct.Struct("=16sQII")  # magic, number of the write, length and checksum of the JSON behind it
_MAGIC = b"paceline rank 1\0"
_ROOM = _COPY - _HEAD.size
_ATTEMPTS = 3


@dataclass(frozen=True)
class RankPage:
    """What a rank has written last. Groups and operations are as in diagnose/evidence.py, as JSON."""

    time: float = 0.0  # of the write, by time.monotonic(), which is that of all processes of a machine
    pid: int = 0
    micros: int = 0  # counters of runtime/whereabouts.py
    read: int = 0
    calls: int = 0
    operations: int = 0  # entered plus left, of all groups, sends and receives included: changes with each
    groups: tuple[Mapping[str, Any], ...] = ()
    stood: float = 0.0  # seconds in which none of the counters has changed
    pending: tuple[Mapping[str, Any], ...] = ()  # operations; once it has stood still
    place: str = ""  # of its main thread; once it has stood still
    source: str = ""  # of `groups`: "flight recorder" or "sequence numbers"
    missing: str = ""  # what this torch does not tell
    ended: str = ""  # how its code ended


class RankPageWriter:
    """Writes the page of one rank. If that is not possible, nobody reads it: this must not stop training."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._number = 0
        with suppress(OSError):
            self._descriptor = regular_files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
            os.pwrite(self._descriptor, bytes(2 * _COPY), 0)  # takes the space, and removes the page of an earlier rank

    def write(self, values: Mapping[str, Any]) -> None:
        if self._descriptor < 0:
            return
        content = _encode(values)
        self._number += 1
        head = _HEAD.pack(_MAGIC, self._number, len(content), zlib.crc32(content))
        with suppress(OSError):
            os.pwrite(self._descriptor, head + content, _COPY * (self._number % 2))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def pack_ranks(ranks: Iterable[int]) -> list[list[int]]:
    """Ranks as runs of [first, number, stride]: groups of a mesh have one, and a group may have thousands of ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and (runs[-1][1] == 1 or rank == runs[-1][0] + runs[-1][1] * runs[-1][2]) and rank > runs[-1][0]:
            first, number, stride = runs[-1]
            runs[-1] = [first, number + 1, rank - first if number == 1 else stride]
        else:
            runs.append([rank, 1, 1])
    return runs


def _unpack_ranks(runs: Iterable[list[int]]) -> list[int]:
    return [first + stride * place for first, number, stride in runs for place in range(number)]


def _encode(values: Mapping[str, Any]) -> bytes:
    """JSON of at most the size of a copy. What does not fit: groups and operations at the end, which are the newest."""
    content = json.dumps(values, separators=(",", ":")).encode()
    kept = dict(values)
    while len(content) > _ROOM:
        longest = max(
            (name for name in kept if isinstance(kept[name], list | tuple | str)), key=lambda name: len(kept[name])
        )
        kept[longest] = kept[longest][: len(kept[longest]) // 2]
        content = json.dumps({**kept, "missing": "some groups and operations: there are too many"}).encode()
    return content


def read_pages(folder: RunFolder) -> dict[int, RankPage]:
    """The pages of all ranks that have one. Foreign and damaged files are skipped."""
    pages = {rank: _read(path) for rank, path in folder.page.existing().items()}
    return {rank: page for rank, page in pages.items() if page is not None}


def _read(path: Path) -> RankPage | None:
    for _ in range(_ATTEMPTS):  # a write may be in progress, after one that was interrupted
        with suppress(OSError):
            content = regular_files.read_bytes(path, 2 * _COPY)
            found = [each for place in (0, _COPY) if (each := _decode(content[place : place + _COPY])) is not None]
            if found:
                return max(found, key=lambda each: each[0])[1]
    return None


def _decode(copy: bytes) -> tuple[int, RankPage] | None:
    with suppress(struct.error, ValueError, TypeError, KeyError):
        magic, number, length, checksum = _HEAD.unpack_from(copy)
        content = copy[_HEAD.size : _HEAD.size + length]
        if magic == _MAGIC and len(content) == length and zlib.crc32(content) == checksum:
            values = json.loads(content)
            values["groups"] = tuple({**each, "ranks": _unpack_ranks(each["ranks"])} for each in values["groups"])
            values["pending"] = tuple(values["pending"])
            return number, RankPage(**{name: values[name] for name in _NAMES if name in values})
    return None


_NAMES = [each.name for each in fields(RankPage)]
