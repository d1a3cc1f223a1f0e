"""One run folder, one job: a lock that dies with the process that holds it.

    lock = RunLock(folder)
    lock.take()        # on the first rank, before anything in the folder is read for a resume or changed
    ...
    lock.release()     # when the run is over; a killed process releases it without a word

It is a POSIX record lock on `<run>/.lock`, whose text says who holds it. The kernel keeps it, and over NFS the server,
so there is no stale one to clean up. Forked processes (data workers) do not inherit it. Its pitfall: a process that
closes *any* descriptor of the file gives the lock up, so nothing else in the holder's process may open `.lock`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import warnings
from datetime import UTC, datetime
from pathlib import Path

from paceline.errors import CheckpointError

NAME = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_LONGEST = 4096  # bytes of a lock's text that are looked at

# A process never stands in its own way, so the folders that this one holds are noted; by process, because a forked one
# has the note but not the lock.
_held: set[tuple[int, Path]] = set()


class RunLock:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._descriptor: int | None = None

    def take(self) -> None:
        """Raises `checkpoint.run-in-use` where somebody else has it."""
        mark = (os.getpid(), self._folder)
        if mark in _held:
            raise _in_use(self._folder, _here(), "this very process: another Trainer in it")
        try:
            descriptor = _lock(self._folder)
        except OSError as error:
            raise CheckpointError(
                "no-lock",
                f"The run folder {self._folder} can't be locked: {error.strerror}.",
                why="without a lock two jobs could write into one run",
                fix="check the rights of the folder and of the file .lock in it",
            ) from None
        if descriptor is not None:
            text = json.dumps(_here()).encode()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text, 0)
            self._descriptor = descriptor
            _held.add(mark)

    def release(self) -> None:
        """Can be called twice. In a forked process it does nothing: the lock is its parent's."""
        mark = (os.getpid(), self._folder)
        if self._descriptor is not None and mark in _held:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
            _held.remove(mark)


def require_free(folder: Path) -> None:
    """Raises where somebody has the lock now. For who will let another process take it."""
    lock = RunLock(folder)
    lock.take()
    lock.release()


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock; None, with a warning, on a disk that has none."""
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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
        warnings.warn(
            f"the disk of {folder} knows no locks ({error.strerror}): take care that no other job uses this run folder",
            stacklevel=3,
        )
        return None


def _here() -> dict[str, object]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _holder(descriptor: int) -> dict[str, object]:
    """What the holder wrote; nothing where it has not come to that yet."""
    try:
        found = json.loads(os.pread(descriptor, _LONGEST, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and {"host", "pid", "since"} <= found.keys() else {}


def _in_use(folder: Path, holder: dict[str, object], who: str = "") -> CheckpointError:
    where = f"process {holder['pid']} on {holder['host']}, since {holder['since']}" if holder else "another process"
    return CheckpointError(
        "run-in-use",
        f"The run folder {folder} is in use by {who or where}.",
        why="two jobs in one run folder would mix their checkpoints and metrics",
        fix="wait for that job or end it, or give this one another run folder (run: NAME)",
    )
