"""The file operations of a save.

They are methods of one class so that tests can record them, replay any prefix of them, or make any of them fail.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Filesystem:
    """The real filesystem."""

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        """Create a file for writing. Fails if it exists; links are not followed."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Returns the number of bytes written, which may be less than all."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def exchange(self, one: Path, other: Path) -> bool:
        """Swap two names atomically. Returns False if that is not supported."""
        renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        if renameat2 is None:
            return False
        if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            return False
        raise OSError(number, os.strerror(number), str(one))

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its contents."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


def write_all(disk: Filesystem, descriptor: int, data: memoryview) -> None:
    """Write all of `data`, in as many calls as it takes."""
    while data:
        written = disk.write(descriptor, data)
        if written <= 0:
            raise OSError(errno.EIO, "no bytes were written")
        data = data[written:]


def write_new(disk: Filesystem, path: Path, data: bytes) -> None:
    """Write a small new file. It is synced to disk when this returns."""
    descriptor = disk.create(path)
    try:
        write_all(disk, descriptor, memoryview(data))
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
