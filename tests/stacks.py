"""Where the processes of a test are that does not end, for its report.

`python stacks.py PID FILE` watches the processes below PID, a worker, from outside: a rank that hangs can't tell. The
worker writes `SECONDS TEST` to its standard input when a test begins, and an empty line when it ends. A test that has
used three quarters of its time is looked at: a line of JSON in FILE tells what there is of it. tests/conftest.py adds
that to the report of a test that failed, in its words: every process, every distinct stack once, every output once.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import psutil

LINES = 120  # of a report
_SHARE = 0.75  # of its time limit, until a test is looked at
_PAUSE = 10.0  # seconds between two looks at whether the worker is there
_FRAMES = 20  # of a stack
_TAIL = 25  # lines of an output


@dataclass
class Process:
    pid: int
    parent: int
    name: str  # its role, or the beginning of its command line
    since: float
    stack: str = ""  # as py-spy prints it
    output: str = ""  # the file behind its standard output or error


@dataclass
class Seen:
    """What there was of a test."""

    test: str
    at: float
    processes: list[Process]
    outputs: dict[str, str]  # the end of each, by file


# Looking


def watch(worker: psutil.Process, file: Path) -> None:
    """Until the worker has ended."""
    test, due, unread = "", float("inf"), ""
    while worker.is_running():  # ranks that it leaves behind hold the other end of the pipe as well
        if select.select([0], [], [], min(_PAUSE, max(0.0, due - time.monotonic())))[0]:
            told = os.read(0, 65536).decode()
            if not told:
                return
            *lines, unread = (unread + told).split("\n")
            seconds, _, test = lines[-1].partition(" ") if lines else ("", "", test)
            due = time.monotonic() + _SHARE * float(seconds) if seconds else float("inf")
        elif time.monotonic() >= due:
            due = float("inf")
            with file.open("a") as out:
                out.write(json.dumps(asdict(seen_of(worker, test))) + "\n")


def seen_of(worker: psutil.Process, test: str) -> Seen:
    """At the worker and all below it but this process."""
    known = {_output(worker.pid, descriptor)[0] for descriptor in (1, 2)}  # pytest shows what it captures
    own = " ".join(worker.cmdline())
    found, outputs = [], dict[str, str]()
    for process in [worker, *worker.children(recursive=True)]:
        try:
            if process.pid == os.getpid():
                continue
            words = " ".join(process.cmdline())  # a rank has written there which one it is
            name = "the worker of pytest" if process == worker else "forked by it" if words == own else words[:100]
            one = Process(process.pid, process.ppid(), name, process.create_time())
            if "python" in process.exe():
                one.stack = _stack(process.pid)
        except psutil.Error:
            continue
        for descriptor in (1, 2):
            identity, text = _output(process.pid, descriptor)
            if identity and identity not in known:
                one.output = one.output or identity
                outputs[identity] = text
        found.append(one)
    return Seen(test, time.time(), found, outputs)


def _stack(pid: int) -> str:
    """A process that the interpreter has left behind has no Python frames: there, those of C say more."""
    told = ""
    for options in (["--nonblocking"], ["--native"]):
        command = [str(Path(sys.executable).with_name("py-spy")), "dump", *options, "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return told or str(error)
        told = done.stdout or done.stderr
        if re.search(r"^    \S", told, re.M):
            break
    return told


def _output(pid: int, descriptor: int) -> tuple[str, str]:
    """Which regular file a descriptor of a process is, and its end; nothing if it is none. It may have been deleted."""
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    try:
        if not path.is_file():
            return "", ""
        name, state = path.readlink(), path.stat()
        with path.open("rb") as file:
            file.seek(max(0, state.st_size - 16_000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "", ""
    return f"{name} ({state.st_ino})", "\n".join(lines[-_TAIL:])


# Telling


def read(file: Path, test: str = "") -> list[Seen]:
    """What was seen of a test, or of any."""
    text = file.read_text() if file.exists() else ""
    told = [dict(json.loads(line)) for line in text.split("\n")[:-1]]  # the last one may still be written
    found = [Seen(**{**one, "processes": [Process(**each) for each in one["processes"]]}) for one in told]
    return [seen for seen in found if not test or seen.test == test]


def report(seen: Seen) -> str:
    """Which processes lived, each distinct stack once, and each output once."""
    lines = [f"after {_SHARE:.0%} of its time, at {_clock(seen.at)}:"]
    lines += [
        f"  {one.pid:7} since {_clock(one.since)} ({seen.at - one.since:.0f} s), child of {one.parent}: {one.name}"
        for one in seen.processes
    ]
    said = [
        line
        for name, text in seen.outputs.items()
        if text.strip()
        for line in ("", f"the end of {name}, the output of {_pids_with(seen, name)}:", *_indented(text.splitlines()))
    ]
    stacks = [line for block in _grouped(seen.processes) for line in ("", *block)]
    room = max(LINES - len(lines) - min(len(said), LINES // 3), LINES // 3)  # outputs have a third at least
    lines += _cut(stacks, room)
    return "\n".join(_cut([*lines, *said], LINES))


def _grouped(processes: Iterable[Process]) -> list[list[str]]:
    """The stacks, with the threads that share each; those of main threads first."""
    holders: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for one in processes:
        for thread, frames in threads(one.stack):
            is_main = thread in ("MainThread", str(one.pid))
            holders[frames].append(f"{one.pid}" if is_main else f"{one.pid} {thread}")
    ordered = sorted(holders.items(), key=lambda item: all(" " in holder for holder in item[1]))
    return [[f"stack of {', '.join(who)}:", *_indented(_cut(list(frames), _FRAMES))] for frames, who in ordered]


def threads(dump: str) -> list[tuple[str, tuple[str, ...]]]:
    """The name and frames of each thread that py-spy printed, from the innermost, but those of pytest and of imports.
    A thread that has no others is left out."""
    found = []
    for block in re.split(r"^Thread ", dump, flags=re.M)[1:]:
        head, *lines = block.splitlines()
        name = re.search(r'"(.*)"', head)
        frames = [line.strip() for line in lines if line.startswith("    ") and "<frozen importlib" not in line]
        own = takewhile(lambda frame: not re.search(r"\((?:_pytest|pluggy|xdist|execnet)/", frame), frames)
        found.append((name[1] if name else head.split()[0], tuple(own)))
    if not found and dump.strip():  # what py-spy said instead
        found.append(("MainThread", tuple(dump.strip().splitlines()[:3])))
    return [(name, frames) for name, frames in found if frames]


def _pids_with(seen: Seen, output: str) -> str:
    return ", ".join(str(one.pid) for one in seen.processes if one.output == output) or "a process"


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _cut(lines: Sequence[str], room: int) -> list[str]:
    if len(lines) <= room:
        return list(lines)
    return [*lines[: room - 1], f"… {len(lines) - room + 1} lines more"]


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))


if __name__ == "__main__":
    watch(psutil.Process(int(sys.argv[1])), Path(sys.argv[2]))
