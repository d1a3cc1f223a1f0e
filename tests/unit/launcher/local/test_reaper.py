from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from fresh import in_a_fresh_process
from paceline.launcher.local.reaper import kill_orphans, start_time

WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


def test_a_leftover_rank_is_killed_but_not_a_process_that_got_its_number() -> None:
    leftover, other = subprocess.Popen(WAITS), subprocess.Popen(WAITS)
    try:
        kill_orphans({leftover.pid: start_time(leftover.pid), other.pid: "1"})
        assert leftover.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_that_is_gone_has_no_birth() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert start_time(gone.pid) is None
    assert start_time(os.getpid()) == start_time(os.getpid()) is not None


LAUNCHER = """
import os, signal, subprocess
from paceline.launcher.local.reaper import reaping
rank = subprocess.Popen([sys.executable, "-c", {rank!r}], stdout=subprocess.PIPE)
rank.stdout.readline()
with reaping([rank.pid], grace=60.0):
    {end}
print(rank.poll())
rank.kill()
"""
RANK = """
import signal, pathlib
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("terminated").touch())
print(flush=True)
signal.pause()
"""


def test_when_the_launcher_is_killed_its_ranks_get_a_sigterm(tmp_path: Path) -> None:
    done = in_a_fresh_process(LAUNCHER.format(rank=RANK, end="os.kill(os.getpid(), signal.SIGKILL)"), cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    # The rank has the launcher's standard error, so the run above returned when the rank, too, had ended.
    assert (tmp_path / "terminated").exists()


def test_a_launcher_that_ends_by_itself_leaves_its_ranks_alone(tmp_path: Path) -> None:
    done = in_a_fresh_process(LAUNCHER.format(rank=RANK, end="pass"), cwd=tmp_path)
    assert done.stdout.split() == ["None"], done.stderr
    assert not (tmp_path / "terminated").exists()
