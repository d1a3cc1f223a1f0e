"""Kills ranks that outlived their launcher."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_EXIT_SECONDS = 10.0  # seconds after a SIGKILL


def kill_orphans(started: Mapping[int, str | None]) -> None:
    """Kill ranks that outlived their launcher, identified by pid and start time, and wait until they are gone."""
    handles = []
    for pid, at in started.items():
        if at is not None and start_time(pid) == at:  # the pid may have been reused
            with suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(handles[-1], signal.SIGKILL)
    end = time.monotonic() + _EXIT_SECONDS
    for handle in handles:
        select.select([handle], [], [], max(0.0, end - time.monotonic()))
        os.close(handle)


def start_time(pid: int) -> str | None:
    """When a process was started, in clock ticks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
