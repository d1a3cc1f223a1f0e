"""The lock of a run folder, between real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.run.folder import RunFolder
from paceline.run.lock import RunLock, look

HOLDER = """
import os, sys
from pathlib import Path
from paceline.run.folder import RunFolder
from paceline.run.lock import RunLock
lock = RunLock(RunFolder(Path(sys.argv[1])))
lock.take()
child = os.fork() if "with a child" in sys.argv else -1
if child:
    print("held" if child < 0 else child, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(folder: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds the lock, and what it said."""
    command = [sys.executable, "-c", HOLDER, str(folder), *args]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_another_process_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        with pytest.raises(CheckpointError) as refused:
            RunLock(RunFolder(tmp_path)).take()
        assert refused.value.code == "checkpoint.run-in-use"
        assert f"process {process.pid} on {socket.gethostname()}, since 20" in refused.value.what


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        lock = RunLock(RunFolder(tmp_path))
        lock.take()
        lock.release()


def test_a_forked_child_that_outlives_the_holder_does_not_keep_it(tmp_path: Path) -> None:
    with holder(tmp_path, "with a child") as (process, child):
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        try:
            os.kill(int(child), 0)  # it is there
            lock = RunLock(RunFolder(tmp_path))
            lock.take()
            lock.release()
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_released_one_can_be_taken_by_another_process(tmp_path: Path) -> None:
    lock = RunLock(RunFolder(tmp_path))
    lock.take()
    lock.release()
    lock.release()
    assert (tmp_path / ".lock").read_text() == ""
    with holder(tmp_path) as (_, said):
        assert said == "held"


def test_one_process_cannot_take_the_lock_twice(tmp_path: Path) -> None:
    lock = RunLock(RunFolder(tmp_path))
    lock.take()
    with pytest.raises(CheckpointError, match="another Trainer in this process"):
        RunLock(RunFolder(tmp_path / ".." / tmp_path.name)).take()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stderr=subprocess.PIPE, text=True) as other:
        assert "run-in-use" in other.communicate(timeout=60)[1]  # the refusal has not given it up
    lock.release()


def test_looking_at_a_lock_neither_takes_nor_releases_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(FileNotFoundError):
        look(folder)
    assert not folder.lock.exists()
    with holder(tmp_path) as (process, _):
        folder.lock.chmod(0o400)
        for _ in range(2):
            is_held, by = look(folder)
            assert is_held and by["pid"] == process.pid
        process.kill()
        process.wait(timeout=60)
        assert look(folder) == (False, by)  # a killed holder leaves its description
    lock = RunLock(folder)
    lock.take()
    assert look(folder)[0]
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stderr=subprocess.PIPE, text=True) as other:
        assert "run-in-use" in other.communicate(timeout=60)[1]
    lock.release()
    assert look(folder) == (False, {})


def test_a_folder_that_cannot_be_locked_has_a_code(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint.no-lock.*No such file"):
        RunLock(RunFolder(tmp_path / "none")).take()


def test_a_disk_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    lock = RunLock(RunFolder(tmp_path))
    lock.take()
    assert "does not support locks" in capsys.readouterr().out
    lock.release()
