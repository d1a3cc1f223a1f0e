"""Reads the Python stacks of processes from outside, also of those that are stopped or hold the GIL, with py-spy.

py-spy reads the memory of a process and does not stop it (`--nonblocking`), so a stack may be torn; that is noticed in
most cases, and it is read again. Where the kernel does not permit this (`ptrace_scope`, a container without
CAP_SYS_PTRACE), ranks write their stack when they get a signal (`STACK_SIGNAL`); one that is stopped can't. `allow`
prepares a rank for both.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from paceline.diagnose.hang.evidence import ProcessState, StackFrame
from paceline.run import regular_files

_SECONDS = 5.0  # py-spy takes 20 ms of a core per process; on a machine under load, ten times as long
_ATTEMPTS = 3
_AT_ONCE = 16  # processes of py-spy
_ANSWER = 0.5  # seconds for a process to write its stack
_POLL = 0.005
_STATES: dict[str, ProcessState] = {"T": "stopped", "t": "stopped", "D": "disk", "Z": "exited", "X": "exited"}
_DUMPED = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
# Functions that start a rank, or a process of multiprocessing.
_STARTS = {"run_rank": "launcher/local/rank_main.py", "_bootstrap": "multiprocessing/process.py"}
NOT_PYTHON = "not a Python program"
_CAUSES = {  # part of py-spy's message → reason
    "ermission denied": "not permitted to read its memory",
    "Operation not permitted": "not permitted to read its memory",
    "Failed to find python version": NOT_PYTHON,
    "No such file or directory": "it has exited",
    "No such process": "it has exited",
}
STACK_SIGNAL = signal.SIGRTMIN + 4 if sys.platform == "linux" else signal.SIGUSR2  # SIGUSR1 requests a checkpoint
_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)  # Linux prctl, of the Yama security module


class ProcessStacks(NamedTuple):
    """Stacks of one process, innermost frame first."""

    main: tuple[StackFrame, ...] = ()
    gil_holder: tuple[StackFrame, ...] = ()  # of another thread than the main one
    missing: str = ""  # why there is none


def read_stacks(pids: Iterable[int], files: Mapping[int, Path], seconds: float = _SECONDS) -> dict[int, ProcessStacks]:
    """The stacks of processes, in parallel. `files`: where those that can write their own stack do so."""
    end = time.monotonic() + seconds
    wanted = list(pids)
    with ThreadPoolExecutor(min(_AT_ONCE, len(wanted)) or 1) as pool:
        return dict(zip(wanted, pool.map(lambda pid: _read(pid, files.get(pid), end), wanted), strict=True))


def _read(pid: int, file: Path | None, end: float) -> ProcessStacks:
    found = ProcessStacks(missing="py-spy is not installed")
    beside = Path(sys.executable).with_name("py-spy")
    command = str(beside) if beside.exists() else shutil.which("py-spy") or ""
    for _ in range(_ATTEMPTS if command else 0):
        found = _ask_py_spy(command, pid, end - time.monotonic())
        if found.main or found.missing == NOT_PYTHON or time.monotonic() > end:
            break
    if not found.main and file is not None and (own := _ask_process(pid, file, end)):
        return ProcessStacks(own)
    return found


def _ask_py_spy(command: str, pid: int, seconds: float) -> ProcessStacks:
    try:
        # fmt: off
        answer = subprocess.run(
            [command, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=max(0.0, seconds), check=False,
        )
        # fmt: on
    except subprocess.TimeoutExpired:
        return ProcessStacks(missing="py-spy took too long")
    except OSError as error:
        return ProcessStacks(missing=f"py-spy can't be run ({error.strerror})")
    if answer.returncode:
        message = answer.stderr.decode(errors="replace")
        cause = next((reason for part, reason in _CAUSES.items() if part in message), "")
        return ProcessStacks(missing=cause or f"py-spy failed ({message.strip().partition(chr(10))[0]})")
    return parse(answer.stdout, pid)


def parse(output: bytes, pid: int) -> ProcessStacks:
    """The stacks in py-spy's JSON."""
    main: tuple[StackFrame, ...] = ()
    holder: tuple[StackFrame, ...] = ()
    with suppress(ValueError, KeyError, TypeError):
        for thread in json.loads(output):
            is_main = thread["os_thread_id"] == pid or thread["thread_name"] == "MainThread"
            if is_main:
                main = _frames(thread)
            elif thread["owns_gil"]:
                holder = _frames(thread)
    return ProcessStacks(main, holder, "" if main else "its stack could not be read")


def _frames(thread: Mapping[str, Any]) -> tuple[StackFrame, ...]:
    # Python 3.11 and later have qualified names: Images.__getitem__, main.<locals>.<lambda>
    return _own(
        StackFrame(frame["name"].rpartition(".")[2], frame["filename"], int(frame["line"]))
        for frame in thread["frames"]
    )


def _own(frames: Iterable[StackFrame]) -> tuple[StackFrame, ...]:
    """Without the outer frames, which a forked process has from its parent."""
    return tuple(itertools.takewhile(lambda frame: not frame.file.endswith(_STARTS.get(frame.function, "\0")), frames))


def _ask_process(pid: int, file: Path, end: float) -> tuple[StackFrame, ...]:
    """Let a process write its stack. Without a handler the signal would end it, so the kernel is asked for that."""
    with suppress(OSError, ValueError):
        if not handles(pid, STACK_SIGNAL) or state_of(pid) != "running":
            return ()
        before = len(regular_files.read_bytes(file))
        os.kill(pid, STACK_SIGNAL)
        end = min(end, time.monotonic() + _ANSWER)
        written = b""
        while time.monotonic() < end:
            last, written = written, regular_files.read_bytes(file)[before:]
            if written and written == last:
                return parse_dump(written.decode(errors="replace"))
            time.sleep(_POLL)
    return ()


def parse_dump(text: str) -> tuple[StackFrame, ...]:
    """The stack that `faulthandler` wrote."""
    return _own(StackFrame(name, file, int(line)) for file, line, name in _DUMPED.findall(text))


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def state_of(pid: int) -> ProcessState:
    with suppress(OSError, IndexError):
        return _STATES.get(_stat(pid)[0], "running")
    return "exited"


def has_exited(pid: int) -> bool:
    """False where it can't be known, without /proc."""
    return state_of(pid) == "exited" and Path("/proc/self").exists()


def machine() -> str:
    """Where a number means one process: containers may share the name of their host, but not its numbers."""
    with suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may contain blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pid: int) -> float:
    """That a process has used, and all that it has started."""
    seconds = 0.0
    with suppress(OSError, ValueError, IndexError):
        seconds = sum(map(int, _stat(pid)[11:15])) / os.sysconf(
            "SC_CLK_TCK"
        )  # of itself, and of children that have ended
    return seconds + sum(map(cpu_seconds, children_of(pid)))


def kept_waiting(pid: int) -> float:
    """Seconds in which the main thread of a process could run, but others had the CPU; 0 if that is unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def children_of(pid: int) -> list[int]:
    """Processes that a process has started, such as workers of its DataLoader."""
    found: set[int] = set()
    with suppress(OSError):  # it has exited
        for task in Path(f"/proc/{pid}/task").iterdir():  # a child belongs to the thread that has forked it
            with suppress(OSError, ValueError):
                found.update(map(int, (task / "children").read_text().split()))
    return sorted(found)


def allow(file: Path) -> None:
    """Allow other processes of this user to read the memory of this one and of those that it forks, and write the stack
    of the main thread to a file when asked for it by a signal."""
    if sys.platform != "linux":
        return
    _allow_reading()
    os.register_at_fork(after_in_child=_allow_reading)
    with suppress(OSError):
        descriptor = regular_files.open_descriptor(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=False)  # stays open


def _allow_reading() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
