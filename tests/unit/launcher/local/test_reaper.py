from __future__ import annotations

import os
import signal
import subprocess
import sys

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
