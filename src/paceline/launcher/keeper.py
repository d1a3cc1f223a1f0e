"""A small process that ends the ranks when their launcher is killed: nothing else would tell them."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def keeping(pids: Collection[int], grace: float) -> Iterator[None]:
    """While the block runs, somebody watches over these processes. The signals of a launcher that is gone are sent to
    them: SIGTERM, on which training saves, and SIGKILL when the grace is over."""
    if sys.platform != "linux":  # elsewhere a process can't be named safely
        yield
        return
    theirs, ours = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        try:
            os.close(ours)
            _keep(theirs, pids, grace)
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        yield
    finally:
        with suppress(OSError):
            os.write(ours, b".")  # the launcher lives, and has seen to its ranks itself
        os.close(ours)
        os.waitpid(keeper, 0)


def _keep(launcher: int, pids: Collection[int], grace: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    born = {pid: _birth(pid) for pid in pids}
    if os.read(launcher, 1):
        return
    for number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 0.0)):
        handles = []
        for pid, birth in born.items():
            if birth is not None and _birth(pid) == birth:  # not another process that got its number
                with suppress(ProcessLookupError):
                    handles.append(os.pidfd_open(pid))
                    signal.pidfd_send_signal(handles[-1], number)
        _wait(handles, patience)


def _wait(handles: list[int], seconds: float) -> None:
    """Until the processes are gone, or the time is over."""
    end = time.monotonic() + seconds
    for handle in handles:
        select.select([handle], [], [], max(0.0, end - time.monotonic()))


def _birth(pid: int) -> str | None:
    """When a process began, in the kernel's ticks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
