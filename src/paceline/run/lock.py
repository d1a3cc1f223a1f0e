"""One run folder, one job: a lock that is released when its process exits.

    lock = RunLock(folder)
    lock.take()        # on rank 0, before anything in the folder is read for a resume or changed
    ...
    lock.release()     # at the end of the run; a killed process releases it as well

It is a POSIX record lock on `<run>/.lock`, which also contains the holder. The kernel, or the server over NFS, owns it,
so locks never become stale. Forked processes (data workers) do not inherit it. A process that closes *any* descriptor
of the file releases the lock, so nothing else in the holder's process may open `.lock`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
from datetime import UTC, datetime
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.log import rank_log
from paceline.run import regular_files
from paceline.run.folder import RunFolder

_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_MAX_BYTES = 4096  # of the holder's description
_QUERY = struct.pack("@hhqqi", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)  # struct flock: whole file

# A record lock never conflicts within one process, so this set refuses a second one. By process, because a forked
# process inherits the set but not the lock.
_held: set[tuple[int, Path]] = set()


class RunLock:
    def __init__(self, folder: RunFolder) -> None:
        self._folder = RunFolder(folder.path.resolve())
        self._descriptor: int | None = None

    def take(self) -> None:
        """Raise `checkpoint.run-in-use` if another job holds the lock."""
        mark = (os.getpid(), self._folder.path)
        if mark in _held:
            raise _in_use(self._folder, _here(), "another Trainer in this process")
        regular_files.require_regular(self._folder)
        try:
            descriptor = _lock(self._folder)
            regular_files.unlink_copies(self._folder)
        except OSError as error:
            raise CheckpointError(
                "no-lock",
                f"The run folder {self._folder} can't be locked: {error.strerror}.",
                fix=f"check the permissions of the folder and of {self._folder.lock.name} in it",
            ) from None
        if descriptor is not None:
            _describe(descriptor, json.dumps(_here()).encode())
            self._descriptor = descriptor
            _held.add(mark)

    def release(self) -> None:
        """Release the lock if this process holds it. Does nothing in a forked process: its parent holds the lock."""
        mark = (os.getpid(), self._folder.path)
        if self._descriptor is not None and mark in _held:
            _describe(self._descriptor, b"")
            os.close(self._descriptor)
            self._descriptor = None
            _held.remove(mark)


def require_free(folder: RunFolder) -> None:
    """Raise if another job holds the lock. For a launcher, whose rank 0 will take it."""
    lock = RunLock(folder)
    lock.take()
    lock.release()


def look(folder: RunFolder) -> tuple[bool, dict[str, object]]:
    """Whether a job holds the lock, and its last holder. Does not take it, which would refuse a job that starts now."""
    if (os.getpid(), folder.path.resolve()) in _held:  # to close the file would release it
        return True, _here()
    with os.fdopen(regular_files.open_descriptor(folder.lock), "rb") as file:
        found = fcntl.fcntl(file, fcntl.F_GETLK, _QUERY)
        return struct.unpack_from("@h", found)[0] != fcntl.F_UNLCK, _holder(file.fileno())


def _lock(folder: RunFolder) -> int | None:
    """A descriptor that holds the lock; None, with a warning, on a filesystem without locks."""
    descriptor = regular_files.open_descriptor(folder.lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        if error.errno in _TAKEN:
            raise _in_use(folder, holder) from None
        if error.errno not in _NO_LOCKS:
            raise
        rank_log(0).warning(
            f"the filesystem of {folder} does not support locks ({error.strerror}): make sure no other job uses it"
        )
        return None


def _describe(descriptor: int, text: bytes) -> None:
    """Write the holder's description, unless the file is also somebody else's: a hard link can still be locked."""
    if os.fstat(descriptor).st_nlink == 1:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)


def _here() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": datetime.now(UTC).isoformat(timespec="seconds")}


def _holder(descriptor: int) -> dict[str, object]:
    """The holder's description; empty if it has not been written yet."""
    try:
        found = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and {"host", "pid", "since"} <= found.keys() else {}


def _in_use(folder: RunFolder, holder: dict[str, object], who: str = "") -> CheckpointError:
    where = f"process {holder['pid']} on {holder['host']}, since {holder['since']}" if holder else "another process"
    return CheckpointError("run-in-use", f"The run folder {folder} is in use by {who or where}.")
