"""Checkpoints in a folder:

    checkpoints/
      step-000100/  step-000200/  step-000300/
      latest                       the name of the last checkpoint, for users and other tools
      best                         the names of the best checkpoints, best first
      .step-000400.partial-1f2e/   in progress, or left behind by a save that was killed

A folder whose name starts with a dot is not a checkpoint. All others were renamed after they were complete and synced,
so at any time, even after a power failure, the folder contains either the old state or the new one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from io import RawIOBase
from itertools import count
from pathlib import Path

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.checkpoint_store import POINTERS, Address, Draft, Write
from paceline.errors import CheckpointError
from paceline.run import regular_files
from paceline.run.folder import BEST

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_HEADROOM = 1.05  # required free space, as a multiple of the bytes to write
_LEFTOVERS = (".partial-", ".old-", ".gone-")


class Filesystem:
    """The file operations of a store. They are methods of one class so that tests can record them, replay any prefix of
    them, or make any of them fail."""

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
        regular_files.sync(path)

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


@contextmanager
def new_file(disk: Filesystem, path: Path) -> Iterator[Write]:
    """A function that writes all bytes it gets to a new file, which is synced to disk when the context ends well."""
    descriptor = disk.create(path)
    try:
        yield lambda data: write_all(disk, descriptor, data)
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


class LocalStore:
    """A folder of checkpoints. Draft and checkpoint are folders in it: a commit is a rename."""

    def __init__(self, folder: Path, disk: Filesystem | None = None) -> None:
        self._folder, self._disk = folder, disk or Filesystem()

    def where(self, name: str = "") -> str:
        return str(self._folder / name)

    def names(self) -> Mapping[str, float]:
        found = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else []:
            is_named = not path.name.startswith(".") or _is_only_copy(path)
            looks = path.name.startswith("step-") or (path / manifests.NAME).exists()
            if is_named and looks and path.is_dir() and not path.is_symlink():
                found[path.name] = path.stat().st_mtime  # the best guess: a copy may have changed it
        return found

    def files(self, name: str) -> Mapping[str, int]:
        try:
            with os.scandir(self._folder / name) as entries:
                return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return {}
            raise

    def read(self, name: str, file: str) -> RawIOBase:
        return os.fdopen(regular_files.open_descriptor(self._folder / name / file), "rb", buffering=0)

    def create(self, name: str, size: int, *, overwrite: bool = False, unique_name: bool = False) -> Draft:
        if unique_name:  # numbers appear after resuming from an earlier step
            names = (name if number == 1 else f"{name}-{number}" for number in count(1))
            name = next(each for each in names if not os.path.lexists(self._folder / each))
        target = self._folder / name
        if target.exists() and not overwrite:
            raise CheckpointError(
                "exists",
                f"{target} already exists.",
                why="existing checkpoints are not overwritten by default",
                fix="use another name, or pass overwrite=True to save_checkpoint",
            )
        if target.exists() and not (target / manifests.NAME).exists():
            raise CheckpointError(
                "exists",
                f"{target} already exists and is not a checkpoint.",
                why="overwrite=True replaces checkpoints only",
                fix="use another name, or remove it first",
            )
        self._make_folders(self._folder)
        needed, free = int(size * _HEADROOM), self._disk.free_bytes(self._folder)
        if 0 < free < needed:
            raise CheckpointError(
                "no-space",
                f"Not enough disk space for checkpoint {target}: {needed / 1e6:.3g} MB required, {free / 1e6:.3g} MB "
                "free.",
            )
        partial = _temporary(target, "partial")
        self._disk.make_folder(partial)
        return Draft(name, str(partial.absolute()))  # the folder of the first rank, whatever others have been given

    def _make_folders(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folders(folder.parent)
            self._disk.make_folder(folder)
            self._disk.sync_folder(folder.parent)

    def write(self, draft: Draft, file: str) -> AbstractContextManager[Write]:
        return new_file(self._disk, self._folder / draft.place / file)

    def commit(self, draft: Draft, last: Mapping[str, bytes], *, overwrite: bool = False) -> None:
        partial, target = self._folder / draft.place, self._folder / draft.name
        try:
            for file, content in last.items():
                self._write_new(partial / file, content)
            self._disk.sync_folder(partial)
            replaced = self._publish(partial, target, overwrite)
        except BaseException:
            self.discard(draft)
            raise
        self._disk.sync_folder(self._folder)  # on failure keep the old one: the rename may be lost in a power failure
        if replaced is not None:
            self._try_to_remove(replaced)

    def _write_new(self, path: Path, content: bytes) -> None:
        with new_file(self._disk, path) as write:
            write(memoryview(content))

    def _publish(self, partial: Path, target: Path, overwrite: bool) -> Path | None:
        """Returns the new path of the checkpoint that was replaced, if any."""
        if not (overwrite and target.exists()):
            self._disk.rename(partial, target)
            return None
        if self._disk.exchange(partial, target):
            return partial
        old = _temporary(target, "old")  # between the two renames, `names` has the old checkpoint under this name
        self._disk.rename(target, old)
        try:
            self._disk.rename(partial, target)
        except BaseException:
            self._disk.rename(old, target)
            raise
        return old

    def discard(self, draft: Draft) -> None:
        self._try_to_remove(self._folder / draft.place)

    def _try_to_remove(self, path: Path) -> None:
        """Ignores errors: leftovers are removed when the run is next opened."""
        with suppress(OSError):
            self._disk.remove(path)

    def delete(self, name: str) -> None:
        """Rename first, so that a partially removed checkpoint does not look corrupted."""
        gone = _temporary(self._folder / name, "gone")
        self._disk.rename(self._folder / name, gone)
        self._disk.sync_folder(self._folder)
        self._disk.remove(gone)

    def pointer(self, pointer: str) -> list[str]:
        try:
            names = regular_files.read_text(self._folder / pointer).split()
        except OSError:
            return []
        return [name for name in names if Path(name).name == name]

    def point(self, pointer: str, names: Collection[str]) -> None:
        partial = _temporary(self._folder / pointer, "partial")
        self._write_new(partial, "".join(f"{name}\n" for name in names).encode())
        self._disk.rename(partial, self._folder / pointer)
        self._disk.sync_folder(self._folder)

    def remove_leftovers(self) -> None:
        """Requires the run's lock."""
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else []:
            if _is_only_copy(path):
                self._disk.rename(path, _original(path))
                self._disk.sync_folder(self._folder)
            elif path.name.startswith(".") and any(mark in path.name for mark in _LEFTOVERS):
                self._disk.remove(path)


def _temporary(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def _is_only_copy(path: Path) -> bool:
    """Whether this is an overwritten checkpoint whose replacement was not committed."""
    return path.name.startswith(".") and ".old-" in path.name and not _original(path).exists()


def _original(moved: Path) -> Path:
    return moved.with_name(moved.name[1:].partition(".old-")[0])


def locate(path: Path, disk: Filesystem | None = None) -> Address:
    """The checkpoint with this path."""
    return Address(LocalStore(path.parent, disk), path.name)


def follow_pointer(path: Path, share: Callable[[str | None], str | None] = lambda name: name) -> Path:
    """The checkpoint that a pointer such as `checkpoints/best` names; any other path unchanged. `share` may return the
    name on another rank, as this one may not have access to the folder."""
    if path.name not in POINTERS:
        return path
    name = share(path.name if path.is_dir() else next(iter(LocalStore(path.parent).pointer(path.name)), None))
    if name is None:
        raise no_pointer(str(path))
    return path.with_name(name)


def no_pointer(where: str) -> CheckpointError:
    is_best = Path(where).name == BEST
    return CheckpointError(
        "no-pointer",
        f"{where} names no checkpoint.",
        why="save_best was not set, or no evaluation has completed yet" if is_best else "nothing was saved yet",
    )
