"""How a rank exited, the kinds of failure, and the exit status and the fix of each kind.

`classify` tells what a traceback, a coded error or the last lines of a log are about. Its patterns include the names of
torch's own components where possible: a user's connection to something else, such as a download that fails, is an
exception like any other.

`OomKillDetector` tells whether the SIGKILL that ended a rank came from the kernel's OOM killer, which notifies nobody.
There are two sources of evidence. The kernel log, if it is readable, names each process that was killed. And the kernel
counts OOM kills for each memory cgroup (a container, a SLURM step) and for the whole machine: the counters are read
when the ranks start and again after one was killed. They do not say which process it was, only that there was one.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from paceline.errors import LaunchError
from paceline.run import failures
from paceline.run.failures import FailureRecord
from paceline.run.folder import RunFolder

FailureKind = Literal[
    "exception", "cpu-memory", "gpu-memory", "oom-killer", "signal", "lost-connection", "port-in-use", "timeout",
    "version-mismatch", "early-exit", "exit", "node-lost", "hang",
]  # fmt: skip

# Exit statuses of a launch. A signal is 128 + its number; a rank's own sys.exit(n) is n.
EXIT_STATUSES: Mapping[FailureKind, int] = MappingProxyType(
    {
        "exception": 1,
        "cpu-memory": 69,
        "gpu-memory": 70,
        "oom-killer": 71,
        "lost-connection": 72,
        "port-in-use": 73,
        "timeout": 74,
        "version-mismatch": 75,
        "early-exit": 76,
        "node-lost": 78,
        "hang": 79,
    }
)

FIXES: Mapping[FailureKind, str] = MappingProxyType(
    {
        "exception": "",  # part of its message
        "cpu-memory": "use a smaller micro_batch (accumulate keeps the batch), fewer loader workers, or more memory",
        "gpu-memory": "use a smaller micro_batch (accumulate keeps the batch), bf16, or a layout that shards the model",
        "oom-killer": "host memory, not GPU memory, was full: use fewer loader workers, fewer ranks per "
        "machine, less data held in memory, or raise the memory limit of the job",
        "signal": "if nobody sent it, check the limits of the scheduler or the container, and the rank's log",
        "lost-connection": "no rank died, so check the network between these addresses: cables, firewall, MTU",
        "port-in-use": "choose another port, or omit it to use a free one; check for an old run that still holds it",
        "timeout": "check the log of the rank that the others waited for; if it is only slow, raise timeout",
        "version-mismatch": "install the same versions on every machine",
        "early-exit": "ranks must run the same number of steps: look for a return, a break or data that ends early",
        "exit": "the script, or a library it uses, called exit; see the rank's log",
        "hang": "check the lines that the report names; the stacks of all ranks are with the logs of the run",
        "node-lost": "check that machine: was it shut down, preempted or disconnected from the network?",
    }
)
MISMATCH_FIX = (
    "call the same collectives in the same order on every rank, with tensors of the same size: look for a call inside "
    "`if rank == 0:`, a step that only some ranks take, or shapes that depend on the data; PACELINE_DEBUG=1 names the "
    "calls of every rank"
)
SIGNAL_FIXES: Mapping[str, str] = MappingProxyType(
    {
        "SIGABRT": "native code gave up: see what it said at the end of the rank's log",
        "SIGSEGV": "native code crashed: see the end of the rank's log; check for a library built for another torch",
        "SIGBUS": "a memory-mapped file could not be accessed: check free space on disk and in /dev/shm",
        "SIGILL": "native code was built for another CPU: install a build for this one",
    }
)

_PHASES = {  # of a heartbeat
    "start": "at the start",
    "rendezvous": "during rendezvous",
    "load": "while loading",
    "first step": "in its first step",
    "saving": "while saving",
    "evaluating": "while evaluating",
    "done": "after training",
    "returned": "after its code returned",
}
POLL_SECONDS = 0.1  # how late a launcher may notice an exit; a failure record holds the exact time
_SHELL_SIGNALS = {128 + number for number in (2, 6, 9, 11, 15)}  # how a shell reports a signal


@dataclass(frozen=True)
class RankExit:
    """How one rank exited, and the evidence it left."""

    rank: int
    node: int
    code: int | None  # exit status, negative for a signal; None: still running when the launcher stopped it
    time: float  # in seconds, on one clock for all ranks: from the failure record if there is one, else when noticed
    record: FailureRecord | None = None
    phase: str = ""
    step: int | None = None
    tail: str = ""  # the last lines of its log

    @property
    def text(self) -> str:
        """The traceback or error in its record, else the last lines of its log."""
        return self.record.text if self.record else self.tail

    @property
    def place(self) -> str:
        """The line of the user's code in its failure record, or an empty string."""
        return self.record.place if self.record else ""

    @property
    def error_code(self) -> str:
        """The code of the paceline error that ended it, or an empty string."""
        error = self.record.error if self.record else None
        return f"{error['family']}.{error['name']}" if error else ""

    @property
    def signal_number(self) -> int:
        """The signal that killed it, or 0."""
        if self.code is not None and self.code < 0:
            return -self.code
        if self.record is None and self.code in _SHELL_SIGNALS:
            return self.code - 128
        return 0

    @property
    def signal_name(self) -> str:
        try:
            return signal.Signals(self.signal_number).name
        except ValueError:
            return f"signal {self.signal_number}"

    @property
    def earliest(self) -> float:
        """The earliest time at which it may have exited."""
        return self.time if self.record else self.time - POLL_SECONDS

    @property
    def where(self) -> str:
        """What it was doing, according to its heartbeat; with a leading space, or empty."""
        in_step = self.step is not None and self.phase not in ("first step", "done", "returned")
        places = [f"in step {self.step}" if in_step else "", _PHASES.get(self.phase, "")]
        return f" {words}" if (words := ", ".join(filter(None, places))) else ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], *, node: int, clock_offset: float) -> RankExit:
        """An exit reported by another launcher; `clock_offset` is our clock minus that launcher's."""
        from pydantic import TypeAdapter

        exited = TypeAdapter(cls).validate_python(values)  # ValueError: another launcher may send anything
        if exited.record and exited.record.error is not None:
            exited.record.as_error()  # KeyError: it lacks a part
        return replace(exited, node=node, time=exited.time + clock_offset)


def unrecorded(folder: RunFolder, rank: int, code: int | None, when: float) -> FailureRecord | None:
    """A record for a rank that could not write its own; None if it could have."""
    reason = failures.reserve(folder, rank) if code is not None and code > 0 else ""
    if not reason:
        return None
    full = LaunchError(
        "disk-full",
        f"Rank {rank} exited with status {code} and could not write why to {folder.logs}: {reason}.",
        fix="free some space on that disk, or raise the quota, and start again; earlier checkpoints are intact",
    )
    return FailureRecord(rank, when, code or 1, str(full), full.to_dict())


Signature = Literal["cpu-memory", "gpu-memory", "lost-connection", "port-in-use", "timeout", "version-mismatch"]

_VERSION_CODES = {"world.different-versions", "launch.node-differs"}
_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_CPU_MEMORY = re.compile(r"(?m)^([\w.]*_Array)?MemoryError\b|DefaultCPUAllocator: (can't allocate|not enough)")
_GPU_MEMORY = re.compile(r"(CUDA|HIP|XPU) out of memory|\bOutOfMemoryError\b")
_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms|Timed out after \d+ seconds waiting for clients|timed out after \d+ms"
    r"|Watchdog caught collective operation timeout|Application timeout caused pair closure"
    r"|DistStoreError: .*[Tt]ime|wait timeout after \d+ms"
)
_LOST = re.compile(
    r"(gloo/|RuntimeError: |DistBackendError: ).*(Connection (reset|closed) by peer|Broken pipe)"
    r"|remote process exited or there was a network error|ncclRemoteError"
    r"|DistNetworkError|failed to recv, got 0 bytes|Ranks wait in a collective for a rank that has ended"
)
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes|distributed collective mismatch")
_PEER = re.compile(r"(?:peer|error) (?:\[([\da-fA-F.:]+)\]:|([\w.-]+)<)(\d+)")
_BLAMED = re.compile(r" failed on rank (\d+): ")
_CHAIN = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception)")
_TRACEBACK = "Traceback (most recent call last):\n"


def classify(text: str, code: str) -> Signature | None:
    """The known signature of a failure, or None. In a chain of exceptions the first counts. `code` is the code of a
    paceline error, or empty."""
    text = _without_source(_CHAIN.split(text)[0])
    if code in _VERSION_CODES:
        return "version-mismatch"
    if code.endswith(".port-in-use") or _PORT.search(text):
        return "port-in-use"
    if _CPU_MEMORY.search(text) or (code == "train.out-of-memory" and "(cpu)" in text):
        return "cpu-memory"
    if code == "train.out-of-memory" or _GPU_MEMORY.search(text):
        return "gpu-memory"
    if _TIMEOUT.search(text):
        return "timeout"
    if _LOST.search(text):
        return "lost-connection"
    return None


def _without_source(text: str) -> str:
    """A traceback without the source lines it quotes: only the error's own text counts."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def blamed_rank(text: str) -> int | None:
    """The rank whose error this one only repeats: a failure in one rank's part of a save is raised on every rank."""
    found = _BLAMED.search(text)
    return int(found.group(1)) if found else None


def is_mismatch(text: str) -> bool:
    """Whether gloo received the message of another collective, or a tensor of another size. It throws in a thread of
    its own, which aborts the process, or in the one that waits."""
    return _MISMATCH.search(text) is not None


def has_traceback(text: str) -> bool:
    return _TRACEBACK in text


def exception_name(text: str) -> str:
    """The class of the exception at the end of a traceback."""
    after = text.rpartition(_TRACEBACK)[2]
    last = next((line for line in after.splitlines() if line and not line.startswith(" ")), "")
    name = re.match(r"[A-Za-z_][\w.]*", last)
    return name.group() if name else ""


def peers(text: str) -> list[str]:
    """Addresses of the peers to which a connection was lost, as reported by gloo and NCCL."""
    return [f"{address or name}:{port}" for address, name, port in _PEER.findall(text)]


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
