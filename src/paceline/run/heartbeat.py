"""Heartbeats: what each rank is doing, in a 64-byte page that the rank writes and its launcher reads.

    writer = heartbeat.open_writer(folder.heartbeat(rank))     # in the rank
    writer.enter("load")
    writer.at(12)                                              # 12 steps are done; step 13 is in progress

    heartbeat.read(folder)[0]                                  # in the launcher
    # Heartbeat(phase="training", step=12, time=1763220000.1)

The page is a memory-mapped file: a write costs no system call and survives a SIGKILL. A reader may see the step of one
write with the time of the previous one; each number by itself is consistent.

After several failures in the same step the launcher asks the ranks for the samples of that step. Each rank then writes
them down just before it trains on them (`Suspects`).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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


class Heartbeat(NamedTuple):
    """The last write of a rank: its phase, completed optimizer steps, and the time of the write."""

    phase: Phase
    step: int
    time: float

    @property
    def trained(self) -> int | None:
        """The number of the step in progress, counted from 1 as in the metrics; None in other phases."""
        return self.step + 1 if self.phase in ("first step", "training") else None

    def __str__(self) -> str:
        """For display after "rank 3 failed"."""
        if self.trained is not None:
            return f"in step {self.trained}"
        before = self.phase in ("start", "rendezvous", "load")
        return f"before training ({self.phase})" if before else f"{self.phase} after step {self.step}"


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
