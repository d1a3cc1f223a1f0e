"""Open files of a run folder, which somebody else may have created: links are not followed, and pipes do not block.

    descriptor = regular_files.open_descriptor(folder.ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    regular_files.replace(folder.config, b"...")     # atomically
    regular_files.require_regular(folder)            # before a run continues in a folder

The run folder itself, and any folder above it, may be a link to another disk. What it contains may not.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import CheckpointError

if TYPE_CHECKING:
    from paceline.run.folder import RunFolder

_KINDS = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFREG: "a file",
}  # fmt: skip


def open_descriptor(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, or create it with O_CREAT. Raises OSError for anything else."""
    with suppress(FileNotFoundError):
        _require(path, os.lstat(path))  # opening a device may already have an effect
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # it has become a link since
            _require(path, os.lstat(path))
        raise
    try:
        _require(path, os.fstat(descriptor))
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"{path.name} is {_kind(found)}, not a regular file", str(path))


def _kind(found: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")


def open_log(path: Path | None) -> int:
    """Open a file to append to it; the null device if that is not possible."""
    with suppress(OSError):
        if path is not None:
            return open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return os.open(os.devnull, os.O_WRONLY)


def read_bytes(path: Path, limit: int = -1) -> bytes:
    with os.fdopen(open_descriptor(path), "rb") as file:
        return file.read(limit)


def read_text(path: Path) -> str:
    return read_bytes(path).decode(errors="replace")


def append(path: Path, content: bytes) -> None:
    """In a single write, because other processes may append as well."""
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Write a file, atomically. Whatever has its name is replaced, not written to."""
    with replacing(path) as partial:
        partial.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file that is renamed to `path` at the end, or removed after an error."""
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def require_regular(folder: RunFolder) -> None:
    """Raise if something that a run reads or writes in its folder is a link, a pipe or a device."""
    for path in (*folder.folders, *folder.files()):
        with suppress(FileNotFoundError):
            found = os.lstat(path)
            expected = stat.S_IFDIR if path in folder.folders else stat.S_IFREG
            if stat.S_IFMT(found.st_mode) != expected:
                raise CheckpointError("not-regular", f"{path} is {_kind(found)}; expected {_KINDS[expected]}.")


def unlink_copies(folder: RunFolder) -> None:
    """Give the run its own copy of files with several hard links: a backup made by `cp -al` must not change. Requires
    the run's lock, which is not copied: its holder may be a process that has opened it."""
    for path in folder.files():
        with suppress(OSError):
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and path != folder.lock:
                replace(path, read_bytes(path))
