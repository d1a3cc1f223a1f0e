"""Checks what this machine allows its processes: shared memory, files, threads, memory and cores; and its clock.

Limits are those of this process, which ranks inherit, and those of the cgroups that it is in: a container, a pod or a
SLURM step. `read` collects them, and `judge` compares them with what ranks need.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
import sysconfig
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from paceline.diagnose.exits import cgroups
from paceline.text import format_bytes, plural
from paceline.tools.doctor.finding import Finding, Status, graded, level_of

_MIB, _GIB = 2**20, 2**30
_SHM_FAIL = 16 * _MIB  # less than gloo, NCCL or one batch of a loader worker needs; Docker's default is 64 MiB
_SHM_WARN = _GIB  # 8 workers with 2 prefetched batches of 64 MiB
_OPEN_FILES = 4096  # workers, connections and shared tensors take one or more each; many systems allow 1024
_ENOUGH_FILES = 65536
_LOCKED = 64 * _MIB  # NCCL registers its buffers with the adapter, which locks them; many systems allow 8 MiB
_THREADS_FAIL, _THREADS_WARN = 32, 256  # per rank: the threads of torch and NCCL; the same with loader workers
_MEMORY_FAIL = _GIB // 2  # per rank: importing paceline and torch takes 0.3 GiB
_MEMORY_WARN = 2 * _GIB  # per rank: the same with CUDA, and some batches
_UNLIMITED = 2**60  # cgroup v1 has no word for it, but a number above any memory
_V1_QUOTA = ("quota", "period")
_CLOCK_SLACK = 86400.0  # seconds: files may come from a machine whose clock is ahead
_TIME_ERROR = 5  # answer of adjtimex(2): not synchronized


@dataclass(frozen=True)
class LimitFacts:
    """Bytes and counts; inf: unlimited."""

    shm: tuple[float, float] | None  # size, free; None: there is no /dev/shm
    open_files: tuple[float, float]  # soft, hard
    locked_memory: float
    threads: float  # that may still be started
    memory: float  # available
    memory_limit: float  # of the cgroup
    affinity: int  # cores
    quota: float  # of the cgroup, in cores
    has_thread_count: bool  # OMP_NUM_THREADS is set
    now: float
    newest_file: float  # when the newest installed file was written
    is_synchronized: bool | None  # the clock; None: unknown

    @property
    def cores(self) -> float:
        return min(self.affinity, self.quota)


def read(root: Path = Path("/")) -> LimitFacts:
    """`root`: where /proc, /sys, /dev and /run are."""
    available, limit = _memory(root)
    affinity, quota = read_cores(root)
    return LimitFacts(
        shm=_shared_memory(root / "dev/shm"),
        open_files=_rlimit(resource.RLIMIT_NOFILE),
        locked_memory=_rlimit(resource.RLIMIT_MEMLOCK)[0],
        threads=_threads(root),
        memory=available,
        memory_limit=limit,
        affinity=affinity,
        quota=quota,
        has_thread_count="OMP_NUM_THREADS" in os.environ,
        now=time.time(),
        newest_file=_newest_file(root),
        is_synchronized=(root / "run/systemd/timesync/synchronized").exists() or _kernel_is_synchronized(),
    )


def judge(facts: LimitFacts, ranks: int, *, has_infiniband: bool = False, several_hosts: bool = False) -> list[Finding]:
    """`ranks`: on this machine."""
    return [
        _judge_shared_memory(facts),
        _judge_open_files(facts),
        _judge_locked_memory(facts, has_infiniband),
        _judge_threads(facts, ranks),
        _judge_memory(facts, ranks),
        _judge_cores(facts, ranks),
        _judge_clock(facts),
        _judge_synchronization(facts, several_hosts),
    ]


def read_cores(root: Path = Path("/")) -> tuple[int, float]:
    """Cores that this process may run on, and how many of them its cgroup may use at a time."""
    affinity = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = math.inf
    for folder in cgroups("cpu", root):
        words = text_of(folder / "cpu.max").split() or [text_of(folder / f"cpu.cfs_{name}_us") for name in _V1_QUOTA]
        if all(word.isdecimal() for word in words):  # else `max` or -1: unlimited
            quota = min(quota, int(words[0]) / int(words[1]))
    return affinity, quota


def text_of(path: Path) -> str:
    """Empty if it is missing or not readable."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _number(path: Path) -> float:
    text = text_of(path)
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else math.inf


def _fields(path: Path) -> dict[str, int]:
    """`MemFree: 12 kB` and `inactive_file 12` by name."""
    lines = (line.split() for line in text_of(path).splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _rlimit(which: int) -> tuple[float, float]:
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(which))
    return soft, hard


def _shared_memory(folder: Path) -> tuple[float, float] | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    if found.f_blocks == 0:  # a tmpfs that was mounted with size=0
        return math.inf, math.inf
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _threads(root: Path) -> float:
    # The kernel does not apply RLIMIT_NPROC to root.
    left = math.inf if os.geteuid() == 0 else _rlimit(resource.RLIMIT_NPROC)[0]
    for folder in cgroups("pids", root):
        if (limit := _number(folder / "pids.max")) < math.inf:
            left = min(left, limit - int(text_of(folder / "pids.current") or 0))
    return left


def _memory(root: Path) -> tuple[float, float]:
    """What is available, and the limit of the cgroup. Cached files count as available."""
    available = 1024 * float(_fields(root / "proc/meminfo").get("MemAvailable", math.inf))
    lowest = math.inf
    for folder in cgroups("memory", root):
        limit = min(_number(folder / "memory.max"), _number(folder / "memory.limit_in_bytes"))
        if limit < math.inf:
            used = min(_number(folder / "memory.current"), _number(folder / "memory.usage_in_bytes"))
            stat = _fields(folder / "memory.stat")
            cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            available, lowest = min(available, max(0, limit - used + cached)), min(lowest, limit)
    return available, lowest


def _newest_file(root: Path) -> float:
    """Of paceline's source, and of when packages were installed."""
    newest = 0.0
    installed = Path(sysconfig.get_path("purelib"))
    for folder, pattern in ((Path(__file__).parents[2], "**/*.py"), (installed, "*.dist-info")):
        for path in (root / folder.relative_to("/")).glob(pattern):
            with suppress(OSError):
                newest = max(newest, path.stat().st_mtime)
    return newest


def _kernel_is_synchronized() -> bool | None:
    """The kernel knows, because the NTP client tells it. Reading is allowed without privileges, also in containers."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    answer = adjtimex(ctypes.create_string_buffer(512))  # struct timex, 208 bytes; zeros: change nothing
    return None if answer < 0 else answer != _TIME_ERROR


def _size(size: float) -> str:
    return "unlimited" if size == math.inf else format_bytes(size)


def _count(number: float) -> str:
    return "unlimited" if number == math.inf else f"{number:.0f}"


def _judge_shared_memory(facts: LimitFacts) -> Finding:
    if facts.shm is None:
        return graded("shared memory", "fail", "/dev/shm does not exist", "missing")
    size, free = facts.shm
    what = f"/dev/shm: {_size(size)}, {_size(free)} free"
    case = "small" if size < _SHM_WARN else "full"
    return graded("shared memory", level_of(free, _SHM_FAIL + 1, _SHM_WARN), what, case)


def _judge_open_files(facts: LimitFacts) -> Finding:
    soft, hard = facts.open_files
    what = f"limit: {_count(soft)} (hard limit: {_count(hard)})"
    is_low = hard < _OPEN_FILES
    case, enough = ("hard", _ENOUGH_FILES) if is_low else ("", min(hard, _ENOUGH_FILES))
    return graded("open files", "ok" if soft >= _OPEN_FILES else "warn", what, case, enough=_count(enough))


def _judge_locked_memory(facts: LimitFacts, has_infiniband: bool) -> Finding:
    what = f"limit: {_size(facts.locked_memory)}"
    if not has_infiniband:
        return Finding("locked memory", "ok", f"{what}; only InfiniBand needs more")
    return graded("locked memory", level_of(facts.locked_memory, _LOCKED, 0), what)


def _judge_threads(facts: LimitFacts, ranks: int) -> Finding:
    what = f"can still be started: {_count(facts.threads)}"
    status = level_of(facts.threads, ranks * _THREADS_FAIL, ranks * _THREADS_WARN)
    return graded("threads", status, what, ranks=plural(ranks, "rank"), number=ranks * _THREADS_WARN)


def _judge_memory(facts: LimitFacts, ranks: int) -> Finding:
    what = f"{_size(facts.memory)} available for {plural(ranks, 'rank')}"
    if is_limited := facts.memory_limit < math.inf:
        what += f" (limit of the cgroup: {_size(facts.memory_limit)})"
    status = level_of(facts.memory, ranks * _MEMORY_FAIL, ranks * _MEMORY_WARN)
    return graded("memory", status, what, "limited" if is_limited else "")


def _judge_cores(facts: LimitFacts, ranks: int) -> Finding:
    what = f"{facts.cores:g} cores for {plural(ranks, 'rank')}"
    is_limited = facts.quota < facts.affinity
    if is_limited:
        what += f" (limit of the cgroup; the machine shows {facts.affinity})"
    if facts.cores < ranks:
        return graded("cores", "warn", what, "few")
    status: Status = "warn" if is_limited and not facts.has_thread_count else "ok"
    return graded("cores", status, what, "limited", share=int(facts.cores) // ranks)


def _judge_clock(facts: LimitFacts) -> Finding:
    now, newest = (datetime.fromtimestamp(moment, UTC) for moment in (facts.now, facts.newest_file))
    what = f"the clock says {now:%Y-%m-%d %H:%M} UTC; the newest installed file is from {newest:%Y-%m-%d}"
    is_late = facts.now < facts.newest_file - _CLOCK_SLACK
    return graded("clock", "fail" if is_late else "ok", what)


def _judge_synchronization(facts: LimitFacts, several_hosts: bool) -> Finding:
    states = {True: "synchronized", False: "not synchronized", None: "unknown"}
    is_unused = not several_hosts and not facts.is_synchronized
    what = states[facts.is_synchronized] + "; only logs of several hosts are ordered by it" * is_unused
    is_wrong = several_hosts and facts.is_synchronized is False
    return graded("clock synchronization", "warn" if is_wrong else "ok", what)
