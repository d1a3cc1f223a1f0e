"""Disks for tests of saves: one records every operation, another fails at a given one.

    disk = RecordingDisk()
    Writer(disk=disk).begin(folder, tensors, description).result()
    disk.operations                                   # make_folder, create, write, …, rename, sync_folder

    disk = FailingDisk("write", call=3, error=errno.ENOSPC)   # the third write finds the disk full, and each after it

Both are real disks otherwise: what they do not refuse, they do.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.checkpoint.local_store import Filesystem

Kind = Literal[
    "make_folder", "create", "write", "sync", "close", "sync_folder", "rename", "exchange", "unlink", "remove_folder"
]


@dataclass(frozen=True)
class Operation:
    """One step of a save that ended well."""

    kind: Kind
    path: Path
    other: Path | None = None  # where a rename goes; what an exchange swaps with
    data: bytes = b""
    at: int = 0  # nanoseconds of a clock that all processes of a machine share, to merge what several ranks recorded


class RecordingDisk(Filesystem):
    """Does everything, and keeps `operations`. A folder's removal is recorded as what it is made of."""

    def __init__(self, *, can_exchange: bool = True) -> None:
        self.operations: list[Operation] = []
        self._can_exchange = can_exchange
        self._paths: dict[int, Path] = {}

    def _record(self, kind: Kind, path: Path, other: Path | None = None, data: bytes = b"") -> None:
        self.operations.append(Operation(kind, path, other, data, time.monotonic_ns()))

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._record("make_folder", path)

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._paths[descriptor] = path
        self._record("create", path)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        written = super().write(descriptor, data)
        self._record("write", self._paths[descriptor], data=bytes(data[:written]))
        return written

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self._record("sync", self._paths[descriptor])

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._record("close", self._paths.pop(descriptor))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._record("sync_folder", path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._record("rename", source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        done = self._can_exchange and super().exchange(one, other)
        if done:
            self._record("exchange", one, other)
        return done

    def remove(self, path: Path) -> None:
        for kind, inner in _removals(path):
            if kind == "unlink":
                inner.unlink()
            else:
                inner.rmdir()
            self._record(kind, inner)


def _removals(path: Path) -> Iterator[tuple[Literal["unlink", "remove_folder"], Path]]:
    """What stands in the way first."""
    if path.is_dir() and not path.is_symlink():
        for inner in sorted(path.iterdir()):
            yield from _removals(inner)
        yield "remove_folder", path
    elif path.exists() or path.is_symlink():
        yield "unlink", path


class FailingDisk(Filesystem):
    """Refuses the `call`-th use of an operation (counted from 1) with `error`, and every one after it if `lasting`.

    Without an error a write is cut short instead: half of the bytes are written, which is no failure but a thing that
    systems do. `calls` counts how often each operation was used, so that a test can go through all of them.
    """

    def __init__(
        self,
        operation: str = "",
        call: int = 1,
        error: int | None = None,
        *,
        lasting: bool = True,
        can_exchange: bool = True,
    ) -> None:
        self.calls: Counter[str] = Counter()
        self._operation, self._call, self._error = operation, call, error
        self._lasting, self._can_exchange = lasting, can_exchange

    def _is_hit(self, operation: str) -> bool:
        self.calls[operation] += 1
        count = self.calls[operation]
        return operation == self._operation and (count == self._call or (self._lasting and count > self._call))

    def _pass(self, operation: str, path: Path | None = None) -> None:
        if self._is_hit(operation) and self._error is not None:
            raise OSError(self._error, os.strerror(self._error), None if path is None else str(path))

    def make_folder(self, path: Path) -> None:
        self._pass("make_folder", path)
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._pass("create", path)
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self._is_hit("write"):
            part = super().write(descriptor, data[: (len(data) + 1) // 2])
            if self._error is None:
                return part
            raise OSError(self._error, os.strerror(self._error))
        return super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._pass("sync")
        super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)  # also where it fails: the system has taken the descriptor back
        self._pass("close")

    def sync_folder(self, path: Path) -> None:
        self._pass("sync_folder", path)
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._pass("rename", source)
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        self._pass("exchange", one)
        return self._can_exchange and super().exchange(one, other)

    def remove(self, path: Path) -> None:
        self._pass("remove", path)
        super().remove(path)

    def free_bytes(self, path: Path) -> int:
        self._pass("free_bytes", path)
        return super().free_bytes(path)


OPERATIONS = ("make_folder", "create", "write", "sync", "close", "sync_folder", "rename", "exchange", "remove")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)
