from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import nodes
from fresh import in_a_fresh_process
from paceline.errors import LaunchError
from paceline.launcher.local.rank_parent import RankProcesses, _Parent, kill_orphans, start_time
from paceline.runtime.processes import set_title

DEADLINE = 60.0


def wait_until(ranks: RankProcesses, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        ranks.receive(0.05)


def wait_for_signals(local: int) -> None:
    while True:
        signal.pause()


def test_exits_are_reported_with_their_codes() -> None:
    def end(local: int) -> None:
        if local:
            os.kill(os.getpid(), signal.SIGKILL) if local == 1 else os._exit(7)

    with RankProcesses(3, end, grace=60.0, orphan_seconds=0.0) as ranks:
        wait_until(ranks, lambda: not ranks.running)
    assert {local: code for local, (code, _) in ranks.exits.items()} == {0: 0, 1: -signal.SIGKILL, 2: 7}
    assert sorted(ranks.pids) == [0, 1, 2] and ranks.ended_leftovers == 0


def test_a_rank_that_exits_before_the_others_are_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_slowly(self: _Parent, local: int) -> None:
        start(self, local)
        os.waitid(os.P_PID, next(reversed(self._running)), os.WEXITED | os.WNOWAIT)

    start = _Parent._start
    monkeypatch.setattr(_Parent, "_start", start_slowly)
    with RankProcesses(3, os._exit, grace=60.0, orphan_seconds=0.0) as ranks:
        wait_until(ranks, lambda: not ranks.running)
    assert {local: code for local, (code, _) in ranks.exits.items()} == {0: 0, 1: 1, 2: 2}


def test_children_of_a_rank_that_exited_are_ended_while_others_run(tmp_path: Path) -> None:
    def leave(local: int) -> None:
        if local == 0:
            signal.pause()
        if os.fork() == 0:
            (tmp_path / str(os.getpid())).touch()
            signal.pause()
        nodes.eventually(lambda: list(tmp_path.iterdir()))

    with RankProcesses(2, leave, grace=60.0, orphan_seconds=0.0) as ranks:
        wait_until(ranks, lambda: ranks.running == [0])
        [left] = tmp_path.iterdir()
        wait_until(ranks, lambda: not psutil.pid_exists(int(left.name)))
        assert ranks.running == [0]


def test_ranks_have_the_default_signal_handlers_and_an_empty_mask(tmp_path: Path) -> None:
    of_others = signal.getsignal(signal.SIGCHLD)  # of torch's DataLoader, if an earlier test used workers

    def note(local: int) -> None:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
        assert handlers == [signal.SIG_DFL, signal.SIG_DFL, of_others]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set() and signal.set_wakeup_fd(-1) == -1
        (tmp_path / "done").touch()

    with RankProcesses(1, note, grace=60.0, orphan_seconds=0.0) as ranks:
        wait_until(ranks, lambda: not ranks.running)
    assert (tmp_path / "done").exists()


def test_ranks_that_run_at_the_end_are_killed() -> None:
    with RankProcesses(2, wait_for_signals, grace=60.0, orphan_seconds=0.0) as ranks:
        wait_until(ranks, lambda: ranks.have_started)
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids.values())


def test_if_the_parent_is_killed_its_ranks_die_with_it() -> None:
    with RankProcesses(2, wait_for_signals, grace=60.0, orphan_seconds=0.0) as ranks:
        wait_until(ranks, lambda: ranks.have_started)
        os.kill(ranks._parent, signal.SIGKILL)
        wait_until(ranks, lambda: not ranks.running)
        assert [code for code, _ in ranks.exits.values()] == [-signal.SIGKILL] * 2
        wait_until(ranks, lambda: not any(psutil.pid_exists(pid) for pid in ranks.pids.values()))


def test_a_process_that_cannot_be_forked_has_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise OSError(errno.EAGAIN, "no")

    monkeypatch.setattr("multiprocessing.context.ForkProcess.start", refuse)
    with (
        pytest.raises(LaunchError, match=r"fork-failed.*local rank 0: Resource temporarily unavailable"),
        RankProcesses(2, wait_for_signals, grace=60.0, orphan_seconds=0.0) as ranks,
    ):
        wait_until(ranks, lambda: False)


LAUNCHER = """
import os, pathlib, signal
from paceline.launcher.local.rank_parent import RankProcesses, _Parent
def rank(local):
    def end(number, frame):
        pathlib.Path("terminated").touch()
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    pathlib.Path("ready").touch()
    while True:
        signal.pause()
with RankProcesses(1, rank, grace=60.0, orphan_seconds=0.0) as ranks:
    while not os.path.exists("ready"):
        ranks.receive(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_when_the_launcher_is_killed_its_ranks_get_a_sigterm(tmp_path: Path) -> None:
    done = in_a_fresh_process(LAUNCHER, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    # The rank has the launcher's standard error, so the run above returned when the rank, too, had ended.
    assert (tmp_path / "terminated").exists()


def test_ranks_have_titles(tmp_path: Path) -> None:
    def note(local: int) -> None:
        set_title("rank 0/1 a title that is longer than most command lines" * 40, "pl-rank-0-of-many")
        shown = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(), Path("/proc/self/comm").read_text()
        (tmp_path / "shown").write_text(json.dumps(shown))

    before = Path("/proc/self/cmdline").read_bytes()
    with RankProcesses(1, note, grace=60.0, orphan_seconds=0.0) as ranks:
        wait_until(ranks, lambda: not ranks.running)
    title, name = json.loads((tmp_path / "shown").read_text())
    assert title.startswith("rank 0/1 a") and len(title) == len(before) - 1 and name == "pl-rank-0-of-ma\n"
    assert Path("/proc/self/cmdline").read_bytes() == before


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
