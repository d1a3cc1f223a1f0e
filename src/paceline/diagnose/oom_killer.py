"""Whether the SIGKILL that ended a rank came from the kernel's OOM killer, which notifies nobody.

There are two sources of evidence. The kernel log, if it is readable, names each process that was killed. And the kernel
counts OOM kills for each memory cgroup (a container, a SLURM step) and for the whole machine: the counters are read
when the ranks start and again after one was killed. They do not say which process it was, only that there was one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_LOG = Path("/dev/kmsg")
_RECORD = 8192  # bytes: the maximum size of a kernel log record
_KILLED = re.compile(r"Killed process (\d+)\b")


class OomKillDetector:
    """Detects processes that the OOM killer killed after this was created."""

    def __init__(self) -> None:
        self._log_end = max((number for number, _ in _log_records()), default=-1)
        self._counted = _count()

    def killed(self, pids: Collection[int]) -> set[int]:
        """Those of these processes, all ended by SIGKILL, for which there is evidence of an OOM kill."""
        named = {
            int(pid)
            for number, text in _log_records()
            if number > self._log_end
            for pid in _KILLED.findall(text)
        }  # fmt: skip
        # In a container the log holds pids of the host's namespace, not ours; so if it names none of these processes,
        # the counters decide.
        if known := named & set(pids):
            return known
        return set(pids) if _count() > self._counted else set()


def _log_records() -> Iterator[tuple[int, str]]:
    """Sequence number and text of each record in the kernel log."""
    with suppress(OSError):  # it is missing or not readable
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield from _read(log)
        finally:
            os.close(log)


def _read(log: int) -> Iterator[tuple[int, str]]:
    while True:
        try:
            record = os.read(log, _RECORD).decode(errors="replace")
        except BrokenPipeError:  # overwritten by newer records while reading: continue with those
            continue
        except BlockingIOError:  # the end
            return
        head, _, text = record.partition(";")
        yield int(head.split(",")[1]), text


def _count() -> int:
    """OOM kills so far in our memory cgroup; on the whole machine only if no cgroup has a counter, because that one
    includes everybody who shares the machine."""
    for path in (*_cgroup_files(), Path("/proc/vmstat")):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _cgroup_files() -> Iterator[Path]:
    """Counter files of our memory cgroup and its parents, nearest first, for cgroup v1 and v2. In a container the path
    may be the host's; then the one mounted at the root is ours."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.events"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
        else:
            continue
        own = root / inside.lstrip("/")
        yield from (folder / name for folder in (own, *own.parents) if folder.is_relative_to(root))
