"""What signals do to a process that trains. Each script sends them to itself, so that nothing depends on time."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import forked
from paceline.runtime import environment
from paceline.train.rank_poll import Signals, decode, encode

HEAD = """
import os, signal, sys, time
from signal import SIGINT, SIGTERM, SIGUSR1
from paceline.train.rank_poll import Signals, decode, encode
signal.signal(SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
me = os.getpid()
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return forked.function(lambda: exec(HEAD + body, {}), Path.cwd())


def run_fresh(body: str) -> subprocess.CompletedProcess[str]:
    """In an interpreter of its own, which flushes its output and ends as Python does."""
    return subprocess.run([sys.executable, "-c", HEAD + body], capture_output=True, text=True, timeout=60)


def test_the_strongest_request_wins_and_a_save_can_be_taken() -> None:
    done = run("""
with Signals() as signals:
    def after(number):
        os.kill(me, number)
        return signals.request
    assert (signals.request, signals.since) == ("", None)
    assert after(SIGUSR1) == "save" and signals.since is None
    signals.acknowledge("save")
    assert signals.request == ""
    assert after(SIGUSR1) == "save"
    before = time.monotonic()
    assert after(SIGTERM) == "SIGTERM"
    first = signals.since
    assert before <= first <= time.monotonic()
    signals.acknowledge("save")
    assert after(SIGTERM) == after(SIGUSR1) == "SIGTERM"
    assert after(SIGINT) == "SIGINT" and signals.since == first
assert signal.getsignal(SIGTERM) is signal.getsignal(SIGUSR1) is signal.SIG_DFL
assert signal.getsignal(SIGINT) is signal.default_int_handler
""")
    assert done.returncode == 0, done.stderr


def test_a_second_interrupt_leaves_at_once() -> None:
    done = run("""
try:
    with Signals() as signals:
        os.kill(me, SIGINT)
        print("goes on", flush=True)
        os.kill(me, SIGINT)
        print("never")
except KeyboardInterrupt:
    print("left")
""")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "goes on\n"), done.stderr
    assert "without waiting for the checkpoint" in done.stderr


def test_a_second_interrupt_of_a_session_is_an_exception() -> None:
    done = run("""
sys.ps1 = ">>> "
try:
    with Signals() as signals:
        os.kill(me, SIGINT)
        os.kill(me, SIGINT)
except KeyboardInterrupt:
    print("left")
""")
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


@pytest.mark.parametrize(
    ("asked", "status"),
    [pytest.param("SIGTERM", -signal.SIGTERM, marks=pytest.mark.nightly), ("SIGINT", -signal.SIGINT)],
)
def test_the_end_is_that_of_the_signal_also_where_another_rank_got_it(asked: str, status: int) -> None:
    done = run_fresh(f"""
with Signals() as signals:
    signals.end("")
    signals.end("save")
    sys.stdout.write("saved")
    signals.end("{asked}")
    print("never")
""")
    assert (done.returncode, done.stdout) == (status, "saved"), done.stderr


def test_a_handler_of_the_users_runs_at_the_end_and_the_call_returns() -> None:
    done = run("""
signal.signal(SIGTERM, lambda *_: print("the user's"))
with Signals() as signals:
    os.kill(me, SIGTERM)
    print("saved")
    signals.end(signals.request)
    print("returned")
os.kill(me, SIGTERM)
""")
    assert (done.returncode, done.stdout) == (0, "saved\nthe user's\nreturned\nthe user's\n"), done.stderr


def test_a_forked_worker_dies_of_sigterm_only() -> None:
    done = run("""
with Signals() as signals:
    child = os.fork()
    if child == 0:
        for number in (SIGUSR1, SIGINT, SIGTERM):
            os.kill(os.getpid(), number)
            print("lives", flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -SIGTERM
    assert signals.request == ""
""")
    assert (done.returncode, done.stdout) == (0, "lives\nlives\n"), done.stderr


def test_what_was_ignored_stays_ignored() -> None:
    done = run("""
signal.signal(SIGINT, signal.SIG_IGN)
with Signals() as signals:
    os.kill(me, SIGINT)
    assert signals.request == ""
""")
    assert done.returncode == 0, done.stderr


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body() -> None:
        with Signals() as signals:
            seen.append((signal.getsignal(signal.SIGTERM), signals.request))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(before, "")]


def test_requests_are_encoded_so_that_the_largest_wins() -> None:
    wishes = ["", "save", "SIGTERM", "SIGINT"]
    assert [decode(number) for number in range(4)] == wishes
    assert decode(max(encode(request) for request in wishes)) == "SIGINT"


def test_a_program_that_imports_ipython_is_not_interactive() -> None:
    """Tools import a kernel without being one; a second interrupt ends such a process."""
    import ipykernel  # noqa: F401
    import IPython  # noqa: F401

    assert not environment.is_interactive()
