"""Heartbeats: what each rank is doing, in 64 bytes that the rank writes and its launcher reads.

    writer = heartbeat.open_writer(folder.heartbeat(rank))     # in the rank
    writer.enter("load")
    writer.at(12)                                              # 12 steps are done; step 13 is in progress

    heartbeat.read(folder)[0]                                  # in the launcher
    # Heartbeat(phase="training", step=12, time=1763220000.1)

The heartbeat is a memory-mapped file: a write costs no system call and survives a SIGKILL. A reader may see the step of
one write with the time of the previous one; each number by itself is consistent.

How far a rank has come in detail is in its page, which a thread of the rank writes four times a second
(diagnose/hang/rank_monitor.py):

    writer = RankPageWriter(folder.page(rank))                 # in the rank
    writer.write({"pid": 4711, "micros": 12, ...})
    heartbeat.read_pages(folder)[0].micros                     # in the launcher

It holds two copies, which are written in turn. A rank may be stopped or killed in the middle of a write: the other copy
is then still whole. It is written with `pwrite`, not mapped: a disk that is full is an error that can be ignored, not a
SIGBUS, and one that stalls blocks only the thread that writes, while a page fault would hold the GIL.

After several failures in the same step the launcher asks the ranks for the samples of that step. Each rank then writes
them down just before it trains on them (`Suspects`).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import time
from typing import Any, Literal, NamedTuple, get_args

from paceline.run import regular_files
from paceline.run.folder import RunFolder

Phase = Literal["start", "rendezvous", "load", "first step", "training", "saving", "evaluating", "done", "returned"]

_PHASES: tuple[Phase, ...] = get_args(Phase)
_TRAINING = _PHASES.index("training")
_SIZE = 64
_HEAD = b"paceline page 1\0"
_BODY = struct.Struct("@Hqd")  # behind the head: phase, steps done, time of the last write
_BODY_AT = len(_HEAD)
_write_body = _BODY.pack_into


@dataclass
class Counters:
    """What the main thread of this process has done. While they change, it does not stand still."""

    micros: int = 0  # micro-batches of training whose forward has begun
    read: int = 0  # batches of evaluations and of `trainer.loader`
    calls: int = 0  # methods of the Trainer that all ranks have made together
    ended: str = ""  # how its code has ended, if the launcher knows


counters = Counters()


class Heartbeat(NamedTuple):
    """The last write of a rank: its phase, completed optimizer steps, and the time of the write."""

    phase: Phase
    step: int
    time: float

    @property
    def trained(self) -> int | None:
        """The number of the step in progress, counted from 1 as in the metrics; None in other phases."""
        return self.step + 1 if self.phase in ("first step", "training") else None

    @property
    def reached(self) -> int | None:
        """The step in progress, or the last completed one."""
        if self.phase in ("start", "rendezvous", "load"):
            return None
        if self.phase == "returned":
            return self.step or None
        return self.step if self.trained is None else self.trained


class HeartbeatWriter:
    """Writes one rank's page. `at` is called at every step."""

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        self._buffer = buffer
        _write_body(buffer, _BODY_AT, 0, 0, time())
        buffer[:_BODY_AT] = _HEAD

    @property
    def last(self) -> Heartbeat:
        """What was written last."""
        phase, step, when = _BODY.unpack_from(self._buffer, _BODY_AT)
        return Heartbeat(_PHASES[phase], step, when)

    def at(self, step: int) -> None:
        """`step` steps are done and the next one starts."""
        _write_body(self._buffer, _BODY_AT, _TRAINING, step, time())

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Enter a phase; by default the number of completed steps stays."""
        before: int = _BODY.unpack_from(self._buffer, _BODY_AT)[1]
        _write_body(self._buffer, _BODY_AT, _PHASES.index(phase), before if step is None else step, time())

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Another phase for the duration of a block; the previous one is restored, also after an error."""
        before = _PHASES[_BODY.unpack_from(self._buffer, _BODY_AT)[0]]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


def open_writer(path: Path | None) -> HeartbeatWriter:
    """A writer for the page at a path. Without one, or if it can't be written, nobody reads the page: a missing
    heartbeat must not stop training."""
    if path is not None:
        with suppress(OSError):
            return HeartbeatWriter(_map(path))
    return HeartbeatWriter(bytearray(_SIZE))


def mark_returned(path: Path) -> None:
    """Note that the function or script of a rank has returned, unless its page tells that training is done."""
    with suppress(OSError, struct.error, IndexError):
        content = path.read_bytes() if path.exists() else b""
        phase, step, _ = _BODY.unpack_from(content, _BODY_AT) if content else (0, 0, 0.0)
        if _PHASES[phase] != "done":
            open_writer(path).enter("returned", step)


def _map(path: Path) -> mmap.mmap:
    descriptor = regular_files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
    try:
        # Not just truncated to size: on a full disk a hole in a mapped file would cause a SIGBUS in some later step.
        os.pwrite(descriptor, bytes(_SIZE), 0)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def read(folder: RunFolder) -> dict[int, Heartbeat]:
    """The heartbeats of all ranks that have one. Incomplete and invalid pages are skipped."""
    found = {}
    for rank, path in folder.heartbeat.existing().items():
        with suppress(OSError, struct.error, IndexError):
            content = regular_files.read_bytes(path, _SIZE)
            phase, step, when = _BODY.unpack_from(content, _BODY_AT)
            if content.startswith(_HEAD):
                found[rank] = Heartbeat(_PHASES[phase], step, when)
    return found


@dataclass(frozen=True)
class Suspects:
    """The samples of one rank in a suspect step."""

    step: int
    epoch: int
    samples: Sequence[Any]  # indices in the dataset; empty if it has none


def write_suspects(path: Path, suspects: Suspects) -> None:
    """Write the samples to a file; they survive if the process is killed right after this returns."""
    with suppress(OSError):
        regular_files.replace(path, json.dumps(asdict(suspects), default=_plain).encode())


def _plain(value: Any) -> int | str:
    return int(value) if hasattr(value, "__index__") else str(value)


def read_suspects(folder: RunFolder) -> dict[int, Suspects]:
    """The suspect samples of all ranks that wrote any. Incomplete files are skipped."""
    found = {}
    for rank, path in folder.suspects.existing().items():
        with suppress(OSError, ValueError, TypeError):
            found[rank] = Suspects(**json.loads(regular_files.read_bytes(path)))
    return found


_COPY = 1 << 14
_PAGE_HEAD = struct.Struct("=16sQII")  # magic, number of the write, length and checksum of the JSON behind it
_PAGE_MAGIC = b"paceline rank 1\0"
_ROOM = _COPY - _PAGE_HEAD.size
_ATTEMPTS = 3


@dataclass(frozen=True)
class RankPage:
    """What a rank has written last. Groups and operations are as in diagnose/hang/evidence.py, as JSON."""

    time: float = 0.0  # of the write, by time.monotonic(), which is that of all processes of a machine
    pid: int = 0
    micros: int = 0  # the counters
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
    waits: bool = False  # for a store: no page is written then


class RankPageWriter:
    """Writes the page of one rank. If that is not possible, nobody reads it: this must not stop training."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._number = 0
        with suppress(OSError):
            self._descriptor = regular_files.open_descriptor(path, os.O_RDWR | os.O_CREAT)
            os.pwrite(self._descriptor, bytes(2 * _COPY + 1), 0)  # takes the space, and removes an earlier page

    def write(self, values: Mapping[str, Any]) -> None:
        if self._descriptor < 0:
            return
        content = _encode(values)
        self._number += 1
        head = _PAGE_HEAD.pack(_PAGE_MAGIC, self._number, len(content), zlib.crc32(content))
        with suppress(OSError):
            os.pwrite(self._descriptor, head + content, _COPY * (self._number % 2))

    def mark(self, *, is_waiting: bool) -> None:
        """Whether the thread that writes the page is about to wait for another process."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.pwrite(self._descriptor, bytes([is_waiting]), 2 * _COPY)


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
    pages = {rank: _read_page(path) for rank, path in folder.page.existing().items()}
    return {rank: page for rank, page in pages.items() if page is not None}


def _read_page(path: Path) -> RankPage | None:
    for _ in range(_ATTEMPTS):  # a write may be in progress, after one that was interrupted
        with suppress(OSError):
            content = regular_files.read_bytes(path, 2 * _COPY + 1)
            found = [each for place in (0, _COPY) if (each := _decode(content[place : place + _COPY])) is not None]
            if found:
                return replace(max(found, key=lambda each: each[0])[1], waits=content[2 * _COPY :] == b"\1")
    return None


def _decode(copy: bytes) -> tuple[int, RankPage] | None:
    with suppress(struct.error, ValueError, TypeError, KeyError):
        magic, number, length, checksum = _PAGE_HEAD.unpack_from(copy)
        content = copy[_PAGE_HEAD.size : _PAGE_HEAD.size + length]
        if magic == _PAGE_MAGIC and len(content) == length and zlib.crc32(content) == checksum:
            values = json.loads(content)
            values["groups"] = tuple({**each, "ranks": _unpack_ranks(each["ranks"])} for each in values["groups"])
            values["pending"] = tuple(values["pending"])
            return number, RankPage(**{name: values[name] for name in _NAMES if name in values})
    return None


_NAMES = [each.name for each in fields(RankPage)]
