"""`make burn`: a test that fails now and then is found, and no busy process is left."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

import forked
from nodes import eventually

BURN = Path(__file__).parents[2] / "tools" / "burn.py"
THIRD_TIME = """
import signal
from pathlib import Path

def test_counts():
    file = Path("times")
    times = 1 + int(file.read_text() if file.exists() else 0)
    file.write_text(str(times))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # as in a session of its own
    assert times != 3, "the third time is unlucky"
"""
# Runs bytecode until it is interrupted: a signal just before a blocking call would be seen only after that call.
RUNS_ON = """
from pathlib import Path

def test_runs_on():
    Path("reached").touch()
    while True:
        pass
"""


def test_a_test_that_passes_each_time_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(THIRD_TIME)
    done = forked.script(BURN, "test_it.py", "--runs", "2", "--load", "1", cwd=tmp_path)
    assert done.returncode == 0 and "2 of 2, beside 1 busy" in done.stdout, done.stdout + done.stderr


def test_the_first_failure_is_shown(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(THIRD_TIME)
    done = forked.script(BURN, "test_it.py", "--runs", "9", "--load", "1", cwd=tmp_path)
    assert done.returncode == 1 and "the third time is unlucky" in done.stdout, done.stdout + done.stderr
    assert "run 3 of 9 ended with status 1" in done.stderr and (tmp_path / "times").read_text() == "3"


def test_an_interrupt_ends_the_busy_processes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(RUNS_ON)
    with (tmp_path / "said").open("wb") as said:
        pid = forked.start(
            lambda: forked._script(BURN, ("test_it.py", "--load", "2")), tmp_path, said.fileno(), said.fileno()
        )
    members: list[psutil.Process] = []
    try:
        eventually(lambda: (tmp_path / "reached").exists())
        members += psutil.Process(pid).children(recursive=True)
        assert len(members) >= 3  # two busy ones, and pytest
        os.killpg(pid, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130, (tmp_path / "said").read_text()
        assert not [each for each in members if each.is_running()]
    finally:
        for left in members:
            with suppress(psutil.NoSuchProcess):
                left.kill()
