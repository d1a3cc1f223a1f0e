"""Stacks of processes, read from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import nodes
from paceline.diagnose.hang import process_stacks

PROGRAM = """
import ctypes, faulthandler, sys, threading, time
def sleeps():
    time.sleep(600)
def computes():
    while True:
        pass
def holds_the_gil():
    ctypes.PyDLL(None).sleep(600)
def waits_for_a_thread_that_holds_it():
    threading.Thread(target=holds_the_gil, daemon=True).start()
    time.sleep(600)
class Images:
    def __getitem__(self, index):
        globals()[sys.argv[1]]()
if len(sys.argv) > 2:
    faulthandler.register(int(sys.argv[2]), file=open(sys.argv[3], "a"), all_threads=False)
print(flush=True)
Images()[0]
"""


@contextmanager
def program(tmp_path: Path, *args: str) -> Iterator[int]:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with subprocess.Popen([sys.executable, str(file), *args], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def names(stack: tuple[process_stacks.StackFrame, ...]) -> list[str]:
    return [frame.function for frame in stack]


def read_until(pid: int, wanted: list[str]) -> process_stacks.ProcessStacks:
    def read() -> process_stacks.ProcessStacks | None:
        found = process_stacks.read_stacks([pid], {})[pid]
        return found if names(found.main)[-len(wanted) :] == wanted else None

    return nodes.eventually(read)


def with_gil_holder(pid: int) -> process_stacks.ProcessStacks | None:
    found = process_stacks.read_stacks([pid], {})[pid]
    return found if found.gil_holder else None


@pytest.mark.parametrize("kind", ["sleeps", "computes", "holds_the_gil"])
@pytest.mark.parametrize("stopped", [False, True])
def test_the_stack_of_a_process_ends_at_its_line(tmp_path: Path, kind: str, stopped: bool) -> None:
    wanted = [kind, "__getitem__", "<module>"]
    with program(tmp_path, kind) as pid:
        found = read_until(pid, wanted)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            nodes.eventually(lambda: process_stacks.state_of(pid) == "stopped")
            found = process_stacks.read_stacks([pid], {})[pid]
        assert (names(found.main), found.missing) == (wanted, "")
        line = found.main[0]
        assert Path(line.file).name == "program.py"
        assert PROGRAM.splitlines()[line.line - 1].strip() in (
            "time.sleep(600)",
            "while True:",
            "pass",
            "ctypes.PyDLL(None).sleep(600)",
        )


def test_another_thread_that_holds_the_gil_is_shown(tmp_path: Path) -> None:
    with program(tmp_path, "waits_for_a_thread_that_holds_it") as pid:
        found = nodes.eventually(lambda: with_gil_holder(pid))
        assert "holds_the_gil" in names(found.gil_holder)
        assert "waits_for_a_thread_that_holds_it" in names(found.main)


def test_programs_without_python_and_processes_that_are_gone_are_told_apart(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        found = process_stacks.read_stacks([other.pid, 2**22 - 1], {})
        other.kill()
    assert [(each.main, each.missing) for each in found.values()] == [
        ((), "not a Python program"), ((), "it has exited"),
    ]  # fmt: skip
    assert process_stacks.state_of(2**22 - 1) == "exited"


def test_a_process_writes_its_own_stack_where_reading_it_is_not_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = tmp_path / "py-spy"
    refuses.write_text("#!/bin/sh\necho 'Error: Permission denied (os error 13)' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    own = tmp_path / "stack.txt"
    real = sys.executable
    monkeypatch.undo()
    with (
        program(tmp_path, "sleeps", str(int(process_stacks.STACK_SIGNAL)), str(own)) as pid,
        program(tmp_path, "sleeps") as mute,
    ):
        monkeypatch.setattr(sys, "executable", real)
        for _ in range(2):  # the file is appended to
            found = process_stacks.read_stacks([pid, mute], {pid: own, mute: tmp_path / "none"})
            assert names(found[pid].main) == ["sleeps", "__getitem__", "<module>"]
            assert found[mute] == ((), (), "not permitted to read its memory")
        assert process_stacks.state_of(mute) == "running"  # the signal would have ended it


def test_outer_frames_that_a_forked_process_has_from_its_parent_are_left_out() -> None:
    text = """Current thread 0x1 (most recent call first):
  File "/a/data.py", line 88 in read_image
  File "/lib/multiprocessing/process.py", line 314 in _bootstrap
  File "/a/train.py", line 3 in <module>
"""
    assert process_stacks.parse_dump(text) == (("read_image", "/a/data.py", 88),)


def test_children_are_found() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        assert child.pid in process_stacks.children_of(os.getpid())
        child.kill()


def test_time_that_a_process_waits_for_a_cpu_is_counted() -> None:
    """Two processes that compute on one CPU wait for each other; one that sleeps waits for nobody."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    try:
        assert sleeper.stdout is not None
        with sleeper.stdout as lines:
            lines.readline()  # it has started
        nodes.eventually(lambda: all(process_stacks.kept_waiting(each.pid) > 1.0 for each in both))
        before = process_stacks.kept_waiting(sleeper.pid)
        nodes.eventually(lambda: all(process_stacks.kept_waiting(each.pid) > 2.0 for each in both))
        assert process_stacks.kept_waiting(sleeper.pid) - before < 0.5
    finally:
        for process in (*both, sleeper):
            process.kill()
            process.wait()
    assert process_stacks.kept_waiting(sleeper.pid) == 0.0  # it has ended
