"""A small process that ends the ranks when their launcher is killed: nothing else would tell them."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_GONE_WITHIN = 10.0  # seconds after a SIGKILL


@contextmanager
def reaping(pids: Collection[int], grace: float, patience: float = 0.0) -> Iterator[None]:
    """While the block runs, somebody watches over these processes. When the launcher is gone they may go on for
    `patience` seconds; then they get SIGTERM, on which training saves, and SIGKILL when the grace is over."""
    if sys.platform != "linux":  # elsewhere a process can't be named safely
        yield
        return
    theirs, ours = os.pipe()
    reaper = os.fork()
    if reaper == 0:
        try:
            os.close(ours)
            _reap(theirs, pids, grace, patience)
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        yield
    finally:
        with suppress(OSError):
            os.write(ours, b".")  # the launcher lives, and has seen to its ranks itself
        os.close(ours)
        os.waitpid(reaper, 0)


def _reap(launcher: int, pids: Collection[int], grace: float, patience: float) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    born = {pid: birth(pid) for pid in pids}
    if os.read(launcher, 1):
        return
    stages: tuple[tuple[int, float], ...] = ((0, patience), (signal.SIGTERM, grace), (signal.SIGKILL, 0.0))
    for number, seconds in stages:
        _wait(_send(born, number), seconds)


def end_leftovers(born: Mapping[int, str | None]) -> None:
    """Ranks that outlived their launcher, named by number and birth."""
    _wait(_send(born, signal.SIGKILL), _GONE_WITHIN)


def _send(born: Mapping[int, str | None], number: int) -> list[int]:
    """Handles of the processes that were there to get it."""
    handles = []
    for pid, at in born.items():
        if at is not None and birth(pid) == at:  # not another process that got its number
            with suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(handles[-1], number)
    return handles


def _wait(handles: list[int], seconds: float) -> None:
    """Until the processes are gone, or the time is over."""
    end = time.monotonic() + seconds
    for handle in handles:
        select.select([handle], [], [], max(0.0, end - time.monotonic()))
        os.close(handle)


def birth(pid: int) -> str | None:
    """When a process began, in the kernel's ticks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
