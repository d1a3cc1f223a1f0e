"""Which rank failed first, and why: all of it from what ranks leave."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from faults import cgroups
from paceline.diagnose.cause import FIXES, STATUSES, Cause, RankExit, find_cause
from paceline.diagnose.oom_killer import MemoryKills
from paceline.run.failures import FailureRecord

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = f"{GLOO}pair.cc:553] Connection closed by peer [10.0.0.2]:29082. This is typically caused by a remote worker"
RESET = f"{GLOO}pair.cc:537] Read error [10.0.0.3]:16557: Connection reset by peer. This is typically caused by"
NCCL = "torch.distributed.DistBackendError: ncclRemoteError: A call failed possibly due to a network error"
STORE = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed."
WAITED = f"{GLOO}unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"
TAKEN = "torch.distributed.DistNetworkError: The server socket has failed to listen. code: -98, name: EADDRINUSE"
LOST = [CLOSED, RESET, NCCL, STORE]


def traceback(last: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n{last}\n'


def raised(rank: int, time: float, last: str, code: int | None = 1, **more: Any) -> RankExit:
    return RankExit(rank, more.pop("node", 0), code, time, FailureRecord(rank, time, 1, traceback(last)), **more)


def coded(
    rank: int, time: float, family: str, name: str, what: str = "It went wrong.", fix: str = "mend it"
) -> RankExit:
    parts = {"family": family, "name": name, "what": what, "why": "because", "fix": fix}
    text = f"[{family}.{name}] {what}\n  why: because\n  fix: {fix}"
    return RankExit(rank, 0, 1, time, FailureRecord(rank, time, 1, text, parts))


def gone(rank: int, time: float, code: int | None, **more: Any) -> RankExit:
    return RankExit(rank, more.pop("node", 0), code, time, **more)


def brief(cause: Cause) -> tuple[str, int | None, int]:
    return cause.kind, cause.rank, cause.status


@pytest.mark.parametrize("words", LOST)
@pytest.mark.parametrize("code", [-9, 1, 0, 3])
def test_a_lost_connection_is_a_consequence_of_whatever_ended_a_rank(words: str, code: int) -> None:
    died = raised(1, 5.0, "ValueError: own") if code == 1 else gone(1, 5.0, code)
    cause = find_cause([raised(0, 5.01, words), died, raised(2, 5.02, words)])
    expected = {-9: ("signal", 1, 137), 1: ("exception", 1, 1), 0: ("early-exit", 1, 76), 3: ("exit", 1, 3)}
    assert brief(cause) == expected[code]
    assert cause.what.endswith("; then ranks 0 and 2 lost the connection to it")


def test_of_own_reasons_the_earliest_counts() -> None:
    ends = [raised(0, 7.0, "KeyError: late"), raised(1, 6.0, "ValueError: early"), gone(2, 9.0, -11)]
    cause = find_cause(ends)
    assert brief(cause) == ("exception", 1, 1)
    assert cause.what == "rank 1 raised ValueError" and cause.text.endswith("ValueError: early")


def test_a_silent_death_is_noticed_late_and_still_the_first() -> None:
    ends = [raised(0, 5.01, "Exception: of the user, because a rank was gone"), gone(1, 5.06, -9)]
    assert brief(find_cause(ends)) == ("signal", 1, 137)


def test_a_rank_that_hangs_after_its_exception_is_the_cause_though_it_was_ended() -> None:
    ends = [raised(0, 5.01, CLOSED), raised(1, 5.0, "ValueError: own", code=None)]
    assert brief(find_cause(ends)) == ("exception", 1, 1)


def test_ranks_that_answered_the_launcher_are_no_cause() -> None:
    ends = [
        gone(0, 6.0, -15),
        gone(1, 6.0, 143),
        raised(2, 5.0, "ValueError: own"),
        raised(3, 6.0, "Stopped: told", code=None),
    ]
    assert brief(find_cause(ends)) == ("exception", 2, 1)
    only_lost = [gone(0, 6.0, -15), raised(1, 5.0, CLOSED)]
    assert find_cause(only_lost).kind == "lost-connection"


def test_a_sigterm_from_elsewhere_is_a_signal() -> None:
    cause = find_cause([gone(0, 5.05, -15), raised(1, 5.0, CLOSED)])
    assert brief(cause) == ("signal", 0, 143) and "SIGTERM" in cause.what


def test_a_rank_that_still_ran_is_no_cause() -> None:
    assert brief(find_cause([gone(0, 6.0, None), gone(1, 5.0, 4)])) == ("exit", 1, 4)
    assert find_cause([gone(0, 6.0, None), gone(1, 5.0, 0)]).rank == 0


def test_where_nothing_but_connections_broke_it_was_the_network() -> None:
    cause = find_cause([raised(0, 5.0, CLOSED), gone(1, 5.1, None, node=1), raised(2, 5.1, RESET)], several_nodes=True)
    assert brief(cause) == ("lost-connection", 1, 72)
    assert "ranks 0 (node 0) and 2 (node 0) lost the connection to rank 1 (node 1), which still ran" in cause.what
    assert "10.0.0.2:29082" in cause.what and "10.0.0.3:16557" in cause.what


def test_a_timeout_names_who_waited_and_who_never_came() -> None:
    ends = [raised(0, 9.0, WAITED), gone(1, 9.1, None, phase="saving", step=12), raised(2, 9.05, CLOSED)]
    cause = find_cause(ends)
    assert brief(cause) == ("timeout", 1, 74)
    assert cause.what == (
        "ranks 0 and 2 waited for the others until the time was up; "
        "rank 1 never came, and still ran in step 12, while saving"
    )
    assert "Timed out waiting" in cause.text


@pytest.mark.parametrize(
    "words",
    [
        WAITED,
        f"{GLOO}pair.cc:1] Application timeout caused pair closure",
        "torch.distributed.DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cpu//0/0",
        "torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients joined.",
    ],
)
def test_a_timeout_counts_only_where_nobody_ended(words: str) -> None:
    waiting = raised(0, 9.0, words)
    assert find_cause([waiting, gone(1, 9.1, None)]).kind == "timeout"
    assert find_cause([waiting, gone(1, 2.0, -9)]).kind == "signal"
    assert find_cause([waiting, gone(1, 2.0, 0)]).kind == "early-exit"


def test_an_abort_by_the_watchdog_is_a_timeout() -> None:
    tail = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600000 milliseconds"
    assert brief(find_cause([gone(0, 9.0, -6, tail=tail), gone(1, 9.1, None)])) == ("timeout", 1, 74)
    assert find_cause([gone(0, 9.0, -6), gone(1, 9.1, None)]).what == "rank 0 was ended by SIGABRT"


def test_a_rank_that_was_done_is_not_to_blame_for_what_came_later() -> None:
    ends = [gone(0, 8.0, 0, phase="done"), raised(1, 5.0, CLOSED), gone(2, 9.0, None)]
    assert find_cause(ends).kind == "lost-connection"
    ends = [gone(0, 1.0, 0), gone(1, 5.0, -9), raised(2, 5.01, CLOSED)]
    assert brief(find_cause(ends)) == ("signal", 1, 137)


def test_the_oom_killer_is_told_from_another_kill() -> None:
    ends = [gone(1, 5.0, -9, phase="saving", step=12), raised(0, 5.1, CLOSED)]
    cause = find_cause(ends, oom_killed={1}, several_nodes=True)
    assert brief(cause) == ("oom-killer", 1, 71)
    assert cause.what.startswith("rank 1 (node 0) was killed by the kernel's OOM killer in step 12, while saving")


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (raised(0, 1.0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."), "gpu-memory"),
        (coded(0, 1.0, "train", "out-of-memory"), "gpu-memory"),
        (raised(0, 1.0, TAKEN), "port-in-use"),
        (raised(0, 1.0, "OSError: [Errno 98] Address already in use"), "port-in-use"),
        (coded(0, 1.0, "world", "port-in-use"), "port-in-use"),
        (coded(0, 1.0, "world", "different-versions"), "version-mismatch"),
        (coded(0, 1.0, "launch", "node-differs"), "version-mismatch"),
        (coded(0, 1.0, "data", "no-such-file"), "exception"),
        (coded(0, 1.0, "checkpoint", "not-saved", what=CLOSED), "lost-connection"),
        (raised(0, 1.0, "ConnectionResetError: [Errno 104] Connection reset by peer"), "exception"),
        (raised(0, 1.0, "TimeoutError: timed out"), "exception"),
        (gone(0, 1.0, 1, tail=traceback("ValueError: of a program")), "exception"),
        (gone(0, 1.0, 1, tail=traceback(CLOSED)), "lost-connection"),
        (gone(0, 1.0, 137), "signal"),
    ],
)
def test_words_are_understood(end: RankExit, kind: str) -> None:
    cause = find_cause([end])
    assert cause.kind == kind and cause.status == (137 if kind == "signal" else STATUSES[cause.kind])


def test_of_errors_that_led_to_one_another_the_first_counts() -> None:
    then = "\nDuring handling of the above exception, another exception occurred:\n\n"
    own, lost = traceback("ValueError: own"), traceback(CLOSED)
    for text, kind in ((own + then + lost, "exception"), (lost + then + own, "lost-connection")):
        assert find_cause([RankExit(0, 0, 1, 1.0, FailureRecord(0, 1.0, 1, text))]).kind == kind


def test_an_error_with_a_code_keeps_its_words_and_its_advice_is_shown_once() -> None:
    cause = find_cause([coded(0, 1.0, "world", "different-versions", what="They differ.")])
    assert (cause.text, cause.fix) == ("[world.different-versions] They differ.\n  why: because", "mend it")


@pytest.mark.parametrize("has_words", [True, False])
def test_an_error_that_another_rank_only_repeats_is_not_its_own(has_words: bool) -> None:
    repeated = coded(1, 5.0, "checkpoint", "not-loaded", what="Saving failed on rank 0: ValueError: own")
    first = raised(0, 9.0, "ValueError: own") if has_words else gone(0, 9.0, None)
    cause = find_cause([first, repeated])
    assert brief(cause) == ("exception", 0, 1) and "ValueError: own" in cause.text


def test_a_lost_node_comes_before_what_its_loss_did_to_others() -> None:
    cause = find_cause([raised(0, 5.0, CLOSED)], lost_nodes={1: "ssh: connection closed\n"}, several_nodes=True)
    assert (cause.kind, cause.node, cause.status, cause.text) == ("node-lost", 1, 78, "ssh: connection closed")


def test_sys_exit_keeps_its_status() -> None:
    record = FailureRecord(0, 1.0, 7, "rank 0 called sys.exit(7)\n")
    assert brief(find_cause([RankExit(0, 0, 7, 1.0, record)])) == ("exit", 0, 7)


def test_each_kind_has_a_status_of_its_own_and_advice() -> None:
    assert len(set(STATUSES.values())) == len(STATUSES)
    assert FIXES.keys() - STATUSES.keys() == {"signal", "exit"}


def test_many_ranks_are_counted_not_listed() -> None:
    ends = [gone(0, 5.0, -9), *(raised(rank, 5.1, CLOSED) for rank in range(1, 101))]
    assert "then ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 others lost" in find_cause(ends).what


def test_a_kill_by_the_kernel_leaves_evidence_and_another_kill_none() -> None:
    with cgroups.required() as cgroup:
        kills = MemoryKills()
        victims = [_end("kill", cgroup), _end("allocate", cgroup), _end("kill", cgroup)]
        assert kills.killed(victims) == {victims[1]}
        assert MemoryKills().killed(victims) == set()


def _end(how: str, cgroup: str) -> int:
    """The process that ended by SIGKILL, which it or the kernel sent."""
    body = f"import os, pathlib; pathlib.Path({cgroup!r}, 'cgroup.procs').write_text(str(os.getpid()))\n" + (
        "os.kill(os.getpid(), 9)" if how == "kill" else "bytearray(os.urandom(1 << 20) * 512)"
    )
    process = subprocess.Popen([sys.executable, "-c", body])
    assert process.wait(60) == -signal.SIGKILL
    return process.pid
