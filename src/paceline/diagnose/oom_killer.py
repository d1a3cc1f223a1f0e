"""Whether a rank that got SIGKILL got it from the kernel's OOM killer, which tells nobody.

There are two traces. The kernel's log names each process that it killed, where it may be read. And the kernel counts:
for each memory cgroup (a container, a SLURM step), and over the whole machine. The counters are read when the ranks
start and again when one is gone; they can't say which process it was, only that there was one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

_LOG = Path("/dev/kmsg")
_RECORD = 8192  # bytes: the longest that the kernel writes
_KILLED = re.compile(r"Killed process (\d+)\b")


class MemoryKills:
    """What the kernel has killed for want of memory since this was made."""

    def __init__(self) -> None:
        self._log_end = max((number for number, _ in _log_records()), default=-1)
        self._counted = _count()

    def killed(self, pids: Collection[int]) -> set[int]:
        """Of these processes, which all ended by SIGKILL: those for which there is evidence."""
        named = {
            int(pid)
            for number, text in _log_records()
            if number > self._log_end
            for pid in _KILLED.findall(text)
        }  # fmt: skip
        # In a container the log speaks of processes by numbers of the machine, which are not ours: so where it names
        # none of them, counters are asked.
        if known := named & set(pids):
            return known
        return set(pids) if _count() > self._counted else set()


def _log_records() -> Iterator[tuple[int, str]]:
    """The kernel's log: each record's number, and its text."""
    with suppress(OSError):  # there is none, or it may not be read
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            yield from _read(log)
        finally:
            os.close(log)


def _read(log: int) -> Iterator[tuple[int, str]]:
    while True:
        try:
            record = os.read(log, _RECORD).decode(errors="replace")
        except BrokenPipeError:  # it was overwritten by newer ones while we read: those come next
            continue
        except BlockingIOError:  # the end
            return
        head, _, text = record.partition(";")
        yield int(head.split(",")[1]), text


def _count() -> int:
    """How many processes were killed so far in our memory cgroup; on the whole machine only where no cgroup counts,
    because that number moves for all who share the machine."""
    for path in (*_cgroup_files(), Path("/proc/vmstat")):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _cgroup_files() -> Iterator[Path]:
    """Where our memory cgroup counts, in both versions of cgroups, and those above it: the nearest that is there.
    In a container the path may be one outside of it, and what is mounted at the root is ours."""
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
