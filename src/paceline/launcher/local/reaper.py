"""A helper process that stops the ranks if their launcher is killed."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

_EXIT_SECONDS = 10.0  # seconds after a SIGKILL


@contextmanager
def reaping(pids: Collection[int], grace: float, patience: float = 0.0) -> Iterator[None]:
    """Watch these processes during the block. If the launcher dies, they may continue for `patience` seconds, then get
    SIGTERM, on which training saves, and SIGKILL after the grace period."""
    if sys.platform != "linux":  # other systems have no pidfd to identify a process safely
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
            os.write(ours, b".")  # the launcher is alive and stopped its ranks itself
        os.close(ours)
        os.waitpid(reaper, 0)


def _reap(launcher: int, pids: Collection[int], grace: float, patience: float) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    started = {pid: start_time(pid) for pid in pids}
    if os.read(launcher, 1):
        return
    stages: tuple[tuple[int, float], ...] = ((0, patience), (signal.SIGTERM, grace), (signal.SIGKILL, 0.0))
    for number, seconds in stages:
        _wait(_send(started, number), seconds)


def kill_orphans(started: Mapping[int, str | None]) -> None:
    """Kill ranks that outlived their launcher, identified by pid and start time."""
    _wait(_send(started, signal.SIGKILL), _EXIT_SECONDS)


def _send(started: Mapping[int, str | None], number: int) -> list[int]:
    """Send a signal; returns handles of the processes that received it."""
    handles = []
    for pid, at in started.items():
        if at is not None and start_time(pid) == at:  # the pid may have been reused
            with suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(handles[-1], number)
    return handles


def _wait(handles: list[int], seconds: float) -> None:
    """Wait until the processes exit, or for `seconds`."""
    end = time.monotonic() + seconds
    for handle in handles:
        select.select([handle], [], [], max(0.0, end - time.monotonic()))
        os.close(handle)


def start_time(pid: int) -> str | None:
    """When a process was started, in clock ticks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
