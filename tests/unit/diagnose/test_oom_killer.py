"""OOM kills are told from other kills."""

from __future__ import annotations

import signal
import subprocess
import sys

from faults import cgroups
from paceline.diagnose.oom_killer import OomKillDetector


def test_a_kill_by_the_kernel_leaves_evidence_and_another_kill_none() -> None:
    with cgroups.required() as cgroup:
        detector = OomKillDetector()
        victims = [_killed("kill", cgroup), _killed("allocate", cgroup), _killed("kill", cgroup)]
        assert detector.killed(victims) == {victims[1]}
        assert OomKillDetector().killed(victims) == set()


def _killed(how: str, cgroup: str) -> int:
    """The pid of a process that ended by SIGKILL, sent by itself or by the kernel."""
    body = f"import os, pathlib; pathlib.Path({cgroup!r}, 'cgroup.procs').write_text(str(os.getpid()))\n" + (
        "os.kill(os.getpid(), 9)" if how == "kill" else "bytearray(os.urandom(1 << 20) * 512)"
    )
    process = subprocess.Popen([sys.executable, "-c", body])
    assert process.wait(60) == -signal.SIGKILL
    return process.pid
