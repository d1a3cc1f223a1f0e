"""`paceline launch` and signals: ranks get the time to save, and whoever is impatient need not wait.

The scripts trap signals themselves. What they do is seen in files, so that nothing depends on time.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forked
import nodes

PACELINE = [sys.executable, "-m", "paceline", "launch", "-n", "2"]

# Notes each signal; with the file `save` it "saves" until `saved` is there, and ends as its argument says.
TRAPPING = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
heard = []
def note(number, frame):
    heard.append(signal.Signals(number).name)
    pathlib.Path(f"heard-{rank}.partial").write_text(" ".join(heard))
    os.replace(f"heard-{rank}.partial", f"heard-{rank}")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
pathlib.Path(f"pid-{rank}.partial").write_text(str(os.getpid()))
os.replace(f"pid-{rank}.partial", f"pid-{rank}")
while not os.path.exists("saved"):
    time.sleep(0.01)
pathlib.Path(f"end-{rank}").write_text(" ".join(heard))
if "one ends" in sys.argv and rank == "1":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    nodes.eventually(condition)


class Launched:
    """A launcher and its ranks, a process group of their own."""

    def __init__(self, folder: Path, launcher: nodes.Launcher) -> None:
        self.folder, self.pid, self._launcher = folder, launcher.pid, launcher
        wait_until(lambda: all((folder / f"pid-{rank}").exists() for rank in range(2)))

    def heard(self, rank: int) -> str:
        path = self.folder / f"heard-{rank}"
        return path.read_text() if path.exists() else ""

    def wait_for_words(self, words: str) -> None:
        log = self.folder / "runs/script/logs/rank-0.log"
        wait_until(lambda: log.exists() and words in log.read_text())

    def wait_for_both(self, heard: str) -> None:
        wait_until(lambda: self.heard(0) == self.heard(1) == heard)

    def end(self) -> tuple[int, str]:
        """Its status and what it said; nothing of it is left."""
        status = self._launcher.end()
        for rank in range(2):
            assert not Path(f"/proc/{(self.folder / f'pid-{rank}').read_text()}").exists()
        return status, self._launcher.said


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    (tmp_path / "script.py").write_text(TRAPPING)
    with nodes.launchers(tmp_path) as start:

        def launch(*args: str, options: tuple[str, ...] = ()) -> Launched:
            return Launched(tmp_path, start("launch", "-n", "2", *options, "script.py", *args))

        yield launch


@pytest.mark.parametrize("options", [(), ("--fresh",)])
def test_after_an_interrupt_ranks_save_as_long_as_they_take(
    tmp_path: Path, launched: Callable[..., Launched], options: tuple[str, ...]
) -> None:
    run = launched(options=options)
    os.killpg(run.pid, signal.SIGINT)  # what a terminal's Ctrl-C does
    run.wait_for_both("SIGINT")
    run.wait_for_words("waiting for ranks to save; press Ctrl-C again to kill them")
    (tmp_path / "saved").touch()
    status, err = run.end()
    assert (status, err.count("waiting for ranks")) == (130, 1), err
    assert err.rstrip().endswith("interrupted; partial results are in runs/script")
    assert [(tmp_path / f"end-{rank}").read_text() for rank in range(2)] == ["SIGINT", "SIGINT"]  # once


def test_an_interrupt_of_the_launcher_alone_reaches_the_ranks_once(
    tmp_path: Path, launched: Callable[..., Launched]
) -> None:
    run = launched()
    os.kill(run.pid, signal.SIGINT)
    run.wait_for_both("SIGINT")
    (tmp_path / "saved").touch()
    assert run.end()[0] == 130
    assert [(tmp_path / f"end-{rank}").read_text() for rank in range(2)] == ["SIGINT", "SIGINT"]


def test_a_second_interrupt_ends_all_at_once(tmp_path: Path, launched: Callable[..., Launched]) -> None:
    run = launched()
    os.killpg(run.pid, signal.SIGINT)
    run.wait_for_words("Ctrl-C again")
    os.killpg(run.pid, signal.SIGINT)
    assert run.end()[0] == 130
    assert not list(tmp_path.glob("end-*"))


@pytest.mark.parametrize(("args", "options"), [((), ()), (("one ends",), ()), (("one ends",), ("--fresh",))])
def test_a_sigterm_reaches_the_ranks_which_end_in_their_own_way(
    tmp_path: Path, launched: Callable[..., Launched], args: tuple[str, ...], options: tuple[str, ...]
) -> None:
    run = launched(*args, options=options)
    os.kill(run.pid, signal.SIGTERM)
    run.wait_for_both("SIGTERM")
    (tmp_path / "saved").touch()
    status, err = run.end()
    assert (status, "failed first" in err, "Traceback" in err) == (143, False, False), err
    assert len(list(tmp_path.glob("end-*"))) == 2


def test_after_sigusr1_ranks_go_on(tmp_path: Path, launched: Callable[..., Launched]) -> None:
    run = launched()
    os.kill(run.pid, signal.SIGUSR1)
    run.wait_for_both("SIGUSR1")
    os.kill(run.pid, signal.SIGUSR1)
    run.wait_for_both("SIGUSR1 SIGUSR1")
    (tmp_path / "saved").touch()
    assert run.end()[0] == 0


def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAPPING)
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [*PACELINE, "script.py"])
    try:
        wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)))
        os.write(terminal, b"\x03")
        wait_until(lambda: all((tmp_path / f"heard-{rank}").exists() for rank in range(2)))
        (tmp_path / "saved").touch()
        screen = b""
        while data := read(terminal):
            screen += data
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
    finally:
        os.close(terminal)
    assert b"waiting for ranks to save" in screen
    assert [(tmp_path / f"end-{rank}").read_text() for rank in range(2)] == ["SIGINT", "SIGINT"]


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that the other side is closed
        return b""


def test_ranks_that_use_up_the_grace_are_ended(tmp_path: Path) -> None:
    """Through the launcher's own surface: the command has a grace of half a minute, and more by a recipe only."""
    (tmp_path / "script.py").write_text(TRAPPING)
    caller = """
from paceline.config.launch import LaunchSpec
from paceline.launcher.local import agent
from paceline.launcher.local.start import temporary_logs
from paceline.launcher.local.start import LocalStart, NodeAssignment
from paceline.launcher.workload import Target, Workload
with temporary_logs() as logs:
    start = LocalStart(LaunchSpec(grace=0.2), logs, NodeAssignment(2, world=2))
    outcome = agent.run(Workload(Target("script", "script.py").run), start)
raise SystemExit(128 + outcome.signal)
"""
    command = [sys.executable, "-c", caller]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        wait_until(lambda: all((tmp_path / f"pid-{rank}").exists() for rank in range(2)))
        process.terminate()
        assert process.wait(timeout=60) == 143
    assert not list(tmp_path.glob("end-*"))


def test_a_save_that_fails_after_the_signal_is_shown(tmp_path: Path) -> None:
    script = """
import os, signal, time
import psutil
from paceline.errors import CheckpointError
def fail(*_):
    raise CheckpointError("no-space", "The disk is full.")
signal.signal(signal.SIGTERM, fail)
if os.environ["RANK"] == "0":
    os.kill(psutil.Process().parent().ppid(), signal.SIGTERM)
while True:  # a signal that arrives just before a sleep does not interrupt it
    time.sleep(0.01)
"""
    (tmp_path / "script.py").write_text(script)
    done = forked.paceline("launch", "-n", "2", "script.py", cwd=tmp_path)
    assert done.returncode == 143, done.stderr
    assert "[checkpoint.no-space] The disk is full." in done.stderr and "Traceback" not in done.stderr
