"""Runs tests many times beside busy processes: a test that can fail by chance fails here first.

    make burn TEST=tests/faults/test_frames.py [RUNS=30] [LOAD=8]

Each run is a pytest session of its own, forked from this process, which has imported what takes long. Ends at the first
run that fails, with its output.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

# As in tests/conftest.py, which would come too late here.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest
from transformers import GPT2LMHeadModel, LlamaForCausalLM, ViTForImageClassification  # noqa: F401

import paceline.train.trainer  # noqa: F401

IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
# Ends with its parent, even if that is killed.
BUSY = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(tests: list[str], output: IO[bytes]) -> int:
    """The exit status of a session."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 70
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # tests of ranks inherit it
        try:
            for number in (1, 2):
                os.dup2(output.fileno(), number)
            status = int(pytest.main([*tests, "-W", IMPORTED]))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:  # the session has got a Ctrl-C as well, and tidies up
        with suppress(ProcessLookupError, ChildProcessError):  # it had ended by then
            os.kill(pid, signal.SIGINT)
            os.waitpid(pid, 0)
        raise


def burn(tests: list[str], runs: int, load: int) -> str:
    """What to say at the end."""
    began = time.monotonic()
    with busy_processes(load):
        for number in range(1, runs + 1):
            with tempfile.TemporaryFile() as output:
                if status := run(tests, output):
                    output.seek(0)
                    print(output.read().decode(errors="replace"))
                    raise SystemExit(f"run {number} of {runs} ended with status {status}, beside {load} busy processes")
            print(".", end="", flush=True)
    return f"\n{runs} of {runs}, beside {load} busy processes, in {time.monotonic() - began:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run tests many times beside busy processes.")
    parser.add_argument("tests", nargs="+", help="files or tests, as for pytest")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--load", type=int, default=8, help="the number of busy processes")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(burn(options.tests, options.runs, options.load))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
