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
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.errors import LaunchError
from paceline.run import failures
from paceline.run.failures import FailureRecord
from paceline.run.folder import RunFolder

FailureKind = Literal[
    "exception", "cpu-memory", "gpu-memory", "oom-killer", "signal", "lost-connection", "port-in-use", "timeout",
    "version-mismatch", "early-exit", "exit", "node-lost", "hang",
]  # fmt: skip

_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_KINDS: Mapping[FailureKind, dict[str, Any]] = _TEXTS["kinds"]
EXIT_STATUSES = {kind: facts["status"] for kind, facts in _KINDS.items() if "status" in facts}
FIXES: Mapping[FailureKind, str] = {kind: facts["fix"] for kind, facts in _KINDS.items()}
MISMATCH_FIX: str = _TEXTS["mismatch"]["fix"]
SIGNAL_FIXES: Mapping[str, str] = _TEXTS["signals"]
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
        places = [f"in step {self.step}" if in_step else "", _TEXTS["phases"].get(self.phase, "")]
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
        "disk-full", f"Rank {rank} exited with status {code} and could not write why to {folder.logs}: {reason}."
    )
    return FailureRecord(rank, when, code or 1, str(full), full.to_dict())


Signature = Literal["cpu-memory", "gpu-memory", "lost-connection", "port-in-use", "timeout", "version-mismatch"]

_VERSION_CODES = {"world.different-versions", "launch.node-differs"}
_PATTERNS = {name: re.compile("|".join(parts)) for name, parts in _TEXTS["patterns"].items()}
_PEER = re.compile(r"(?:peer|error) (?:\[([\da-fA-F.:]+)\]:|([\w.-]+)<)(\d+)")
_BLAMED = re.compile(r" failed on rank (\d+): ")
_CHAIN = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception)")
_TRACEBACK = "Traceback (most recent call last):\n"


def classify(text: str, code: str) -> Signature | None:
    """The known signature of a failure, or None. In a chain of exceptions the first counts. `code` is the code of a
    paceline error, or empty."""
    # Without the source lines that a traceback quotes: only the error's own text counts.
    text = "\n".join(line for line in _CHAIN.split(text)[0].splitlines() if not line.startswith("    "))
    if code in _VERSION_CODES:
        return "version-mismatch"
    if code.endswith(".port-in-use") or _PATTERNS["port-in-use"].search(text):
        return "port-in-use"
    if _PATTERNS["cpu-memory"].search(text) or (code == "train.out-of-memory" and "(cpu)" in text):
        return "cpu-memory"
    if code == "train.out-of-memory" or _PATTERNS["gpu-memory"].search(text):
        return "gpu-memory"
    if _PATTERNS["timeout"].search(text):
        return "timeout"
    if _PATTERNS["lost-connection"].search(text):
        return "lost-connection"
    return None


def blamed_rank(text: str) -> int | None:
    """The rank whose error this one only repeats: a failure in one rank's part of a save is raised on every rank."""
    found = _BLAMED.search(text)
    return int(found.group(1)) if found else None


def is_mismatch(text: str) -> bool:
    """Whether gloo received the message of another collective, or a tensor of another size. It throws in a thread of
    its own, which aborts the process, or in the one that waits."""
    return _PATTERNS["mismatch"].search(text) is not None


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
    names = ("memory.events", "memory.oom_control")  # of cgroup v2 and v1
    for path in (*(folder / name for folder in cgroups("memory") for name in names), Path("/proc/vmstat")):
        with suppress(OSError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of our cgroup and its parents, nearest first, for cgroup v1 and v2. In a container the path may be
    the host's; then the one mounted at the root is ours. `root`: where /proc and /sys are."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = mount / inside.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))
