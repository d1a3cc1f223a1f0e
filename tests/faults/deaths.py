"""Eighteen deaths of a rank, and what a launcher has to say of each.

There are two of each kind: on the first rank and on another; at the start, in a step and in a save. What the rank does
stands in dying.py. Memory of a GPU is the one thing that is not really used up: torch's own exception is raised.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from paceline.diagnose.exits import EXIT_STATUSES, FailureKind

_SCRIPT = Path(__file__).with_name("dying.py")
_MARK = "PACELINE_TEST_DEATH"
_DEADLINE = 100.0
_PATIENCE = 5.0  # seconds that a process on its way out has
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Death:
    way: str
    rank: int
    moment: str
    kind: FailureKind
    words: str
    status: int
    ranks: int = 2

    def __str__(self) -> str:
        return f"{self.way}, rank {self.rank}, {self.moment}"


@dataclass(frozen=True)
class Outcome:
    status: int
    said: str
    left: list[str]  # processes, ports and shared memory


def _death(way: str, rank: int, moment: str, words: str, ranks: int = 2) -> Death:
    if way.startswith("SIG"):
        return Death(way, rank, moment, "signal", words, 128 + signal.Signals[way], ranks)
    kind: FailureKind = next(kind for kind in EXIT_STATUSES if kind == way)
    return Death(way, rank, moment, kind, words, EXIT_STATUSES[kind], ranks)


ALL = (
    _death("exception", 1, "step", "ValueError: the injected reason"),
    _death("exception", 0, "save", "ValueError: the injected reason"),
    _death("gpu-memory", 0, "start", "rank 0 ran out of GPU memory"),
    # Of the CPU, as the Trainer sees it.
    Death("gpu-memory", 1, "step", "cpu-memory", "rank 1 ran out of memory", EXIT_STATUSES["cpu-memory"]),
    _death("oom-killer", 1, "step", "rank 1 was killed by the kernel's OOM killer"),
    _death("oom-killer", 0, "save", "rank 0 was killed by the kernel's OOM killer"),
    _death("SIGKILL", 2, "save", "rank 2 was killed by SIGKILL", ranks=3),
    _death("SIGSEGV", 0, "start", "rank 0 was killed by SIGSEGV"),
    _death("lost-connection", 1, "step", "rank 0 lost the connection to rank 1, which is still running"),
    _death("lost-connection", 0, "save", "rank 1 lost the connection to rank 0, which is still running"),
    _death("port-in-use", 0, "start", "rank 0 could not bind its port (already in use)"),
    _death("port-in-use", 1, "step", "rank 1 could not bind its port (already in use)"),
    _death("timeout", 0, "start", "timed out waiting for rank 0, which is still running"),
    _death("timeout", 1, "step", "timed out waiting for rank 1, which is still running"),
    _death("version-mismatch", 1, "start", "rank 1: '0.0.1'"),
    _death("version-mismatch", 0, "start", "rank 0: '0.0.1'"),
    _death("early-exit", 1, "step", "rank 1 exited with status 0"),
    _death("early-exit", 0, "save", "rank 0 exited with status 0"),
)
assert len(ALL) == 18


def paceline(ranks: int) -> list[str]:
    return [sys.executable, "-m", "paceline", "launch", "-n", str(ranks)]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def command(death: Death) -> list[str]:
    return [str(_SCRIPT), death.way, str(death.rank), death.moment]


def run(death: Death, launcher: list[str], folder: Path, cgroup: str) -> Outcome:
    """Let it happen in an empty folder; `cgroup` is one with little memory, for those who need it."""
    mark = uuid.uuid4().hex
    variables = {_MARK: mark, "SMALL_CGROUP": cgroup, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    before = shared_memory()
    # A file, not a pipe: what is left behind would keep that open.
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [*launcher, *command(death)], cwd=folder,
            env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip
        try:
            status = process.wait(_DEADLINE)
        finally:
            process.kill()
            process.wait()
            left = _left(mark, before)
    return Outcome(status, (folder / "said").read_text(errors="replace"), left)


def problem(death: Death, outcome: Outcome) -> str:
    """What paceline did not get right; empty if all is as promised."""
    # Ranks that compare their versions find the difference together: which of them says so does not matter.
    first = "" if death.kind == "version-mismatch" else f"\nrank {death.rank} failed first"
    verdict = next((line for line in outcome.said.splitlines() if " failed first" in line), "")
    wrong = []
    if outcome.status != death.status:
        wrong.append(f"the exit status was {outcome.status}, not {death.status}")
    if first not in outcome.said or not verdict.endswith(f": {death.kind}"):
        wrong.append(f"the verdict was {verdict!r}")
    if death.words not in outcome.said:
        wrong.append(f"it did not say {death.words!r}")
    if "Traceback" in outcome.said.partition(" failed first")[2].partition("Traceback")[2]:
        wrong.append("more than one traceback was shown")
    return "; ".join(wrong + outcome.left)


def _left(mark: str, shared_before: set[str]) -> list[str]:
    """What is still there of a run, in words; processes are ended."""
    deadline = time.monotonic() + _PATIENCE
    while (processes := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    # A port is open as long as a process has it, so a process that is gone has left none.
    ports = [f"port {port} is open" for process in processes for port in _ports(process)]
    for process in processes:
        os.kill(process, signal.SIGKILL)
    return [f"process {process} is there" for process in processes] + ports + left_in_shared_memory(shared_before)


def left_in_shared_memory(before: set[str]) -> list[str]:
    deadline = time.monotonic() + _PATIENCE
    while (found := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.02)  # of another test's, perhaps
    return [f"/dev/shm/{name}" for name in sorted(found)]


def _marked(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended while we looked
    return found


def _ports(process: int) -> list[int]:
    own = set()
    for path in Path(f"/proc/{process}/fd").glob("*"):
        try:
            own.add(str(path.readlink()))
        except OSError:
            continue
    rows = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def shared_memory() -> set[str]:
    """Files only: folders there are those of other tests."""
    return {path.name for path in _SHARED_MEMORY.iterdir() if not path.is_dir()} if _SHARED_MEMORY.is_dir() else set()
