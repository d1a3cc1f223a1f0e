"""Waits for gloo's worker threads before a process group is destroyed.

A worker frees a finished collective, with the tensors and callbacks that it holds, after `wait()` has returned. If it
still does so while the group is destroyed, it may drop the last reference to the group and join itself ("Resource
deadlock avoided"); while the interpreter finalizes, it aborts when it needs the GIL ("terminate called without an
active exception"). torch has no call that waits for this, so the state of the threads is read from /proc.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_INTERVAL = 0.005  # seconds; sleeping releases the GIL, which a worker may be waiting for


def wait_until_idle(timeout: float = 2.0) -> None:
    """Return when no worker has run for two intervals, or after `timeout` seconds."""
    if sys.platform != "linux":
        time.sleep(4 * _INTERVAL)
        return
    deadline = time.monotonic() + timeout
    before: list[str] | None = None
    quiet = 0
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(_INTERVAL)
        workers = _workers()
        quiet = quiet + 1 if workers == before and all("\tS " in each for each in workers) else 0
        before = workers


def _workers() -> list[str]:
    """The state and the number of context switches of each worker: a worker that ran in between has another number."""
    found = []
    for task in sorted(Path("/proc/self/task").iterdir()):
        try:
            status = (task / "status").read_text()
        except OSError:  # it has ended
            continue
        if status.startswith(f"Name:\t{_NAME}\n"):
            found.append("".join(line for line in status.splitlines() if line.startswith(("State", "volun", "nonvol"))))
    return found
