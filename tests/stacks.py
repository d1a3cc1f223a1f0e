"""Records the stacks of ranks that run for too long, for the report of the test that is about to time out.

`python stacks.py PID FILE` watches the processes below PID, from outside: a rank that hangs can't tell. It ends with
PID. tests/conftest.py starts it and adds what it wrote to the report of a test that failed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

TOO_LONG = 90.0  # seconds; the shortest time limit of a test is 120, and ranks live for a few
_LOOK = 10.0


def watch(parent: psutil.Process, file: Path) -> None:
    told: set[int] = set()
    while parent.is_running():
        for process in parent.children(recursive=True):
            try:
                if process.pid not in told and time.time() - process.create_time() > TOO_LONG:
                    told.add(process.pid)
                    if "stacks.py" not in " ".join(process.cmdline()):
                        _tell(process, file)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs([parent], timeout=_LOOK)


def _tell(process: psutil.Process, file: Path) -> None:
    command = [sys.executable.removesuffix("python") + "py-spy", "dump", "--nonblocking", "--pid", str(process.pid)]
    try:
        seen = subprocess.run(command, capture_output=True, text=True, timeout=60)
        words = seen.stdout or seen.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        words = str(error)
    with file.open("a") as out:
        out.write(f"process {process.pid} has lived for {time.time() - process.create_time():.0f} s:\n{words}\n")


if __name__ == "__main__":
    watch(psutil.Process(int(sys.argv[1])), Path(sys.argv[2]))
