"""Which rank failed first, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.diagnose.cause import Cause, find_cause
from paceline.diagnose.exits import EXIT_STATUSES, RankExit
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
def test_a_lost_connection_is_a_consequence_of_another_exit(words: str, code: int) -> None:
    died = raised(1, 5.0, "ValueError: own") if code == 1 else gone(1, 5.0, code)
    cause = find_cause([raised(0, 5.01, words), died, raised(2, 5.02, words)])
    expected = {-9: ("signal", 1, 137), 1: ("exception", 1, 1), 0: ("early-exit", 1, 76), 3: ("exit", 1, 3)}
    assert brief(cause) == expected[code]
    assert cause.what.endswith("; then ranks 0 and 2 lost the connection to it")


def test_of_independent_failures_the_earliest_is_the_cause() -> None:
    exits = [raised(0, 7.0, "KeyError: late"), raised(1, 6.0, "ValueError: early"), gone(2, 9.0, -11)]
    cause = find_cause(exits)
    assert brief(cause) == ("exception", 1, 1)
    assert cause.what == "rank 1 raised ValueError" and cause.text.endswith("ValueError: early")


def test_a_kill_that_is_noticed_late_is_still_the_first_failure() -> None:
    exits = [raised(0, 5.01, "Exception: of the user, because a rank was gone"), gone(1, 5.06, -9)]
    assert brief(find_cause(exits)) == ("signal", 1, 137)


def test_a_rank_that_hangs_after_its_exception_is_the_cause_though_the_launcher_stopped_it() -> None:
    exits = [raised(0, 5.01, CLOSED), raised(1, 5.0, "ValueError: own", code=None)]
    assert brief(find_cause(exits)) == ("exception", 1, 1)


def test_ranks_stopped_by_the_launcher_are_not_the_cause() -> None:
    exits = [
        gone(0, 6.0, -15),
        gone(1, 6.0, 143),
        raised(2, 5.0, "ValueError: own"),
        raised(3, 6.0, "Stopped: told", code=None),
    ]
    assert brief(find_cause(exits)) == ("exception", 2, 1)
    only_lost = [gone(0, 6.0, -15), raised(1, 5.0, CLOSED)]
    assert find_cause(only_lost).kind == "lost-connection"


def test_a_sigterm_from_outside_is_a_signal() -> None:
    cause = find_cause([gone(0, 5.05, -15), raised(1, 5.0, CLOSED)])
    assert brief(cause) == ("signal", 0, 143) and "SIGTERM" in cause.what


def test_a_rank_that_was_running_is_not_the_cause() -> None:
    assert brief(find_cause([gone(0, 6.0, None), gone(1, 5.0, 4)])) == ("exit", 1, 4)
    stopped = find_cause([gone(0, 6.0, None), gone(1, 5.0, 0)])
    assert (stopped.rank, stopped.what) == (0, "rank 0 was stopped by the launcher")


def test_an_early_exit_says_where_the_rank_was() -> None:
    exits = [gone(1, 4.0, 0, phase="saving", step=4), raised(0, 5.0, CLOSED)]
    assert find_cause(exits).what.startswith(
        "rank 1 exited with status 0 in step 4, while saving, while other ranks were still running; then rank 0 lost"
    )


def test_a_rank_that_others_wait_for_in_a_collective_exited_early() -> None:
    what = "Ranks wait in a collective for a rank that has ended:\n    rank 0: all_reduce()\n    rank 1: has ended"
    exits = [coded(0, 5.0, "world", "different-collectives", what=what), gone(1, 4.0, 0, step=3)]
    assert brief(find_cause(exits)) == ("early-exit", 1, 76)


def test_if_only_connections_were_lost_it_was_the_network() -> None:
    cause = find_cause([raised(0, 5.0, CLOSED), gone(1, 5.1, None, node=1), raised(2, 5.1, RESET)], several_nodes=True)
    assert brief(cause) == ("lost-connection", 1, 72)
    assert "0 (node 0) and 2 (node 0) lost the connection to rank 1 (node 1), which is still running" in cause.what
    assert "10.0.0.2:29082" in cause.what and "10.0.0.3:16557" in cause.what


def test_a_timeout_names_the_waiting_ranks_and_the_one_they_waited_for() -> None:
    exits = [raised(0, 9.0, WAITED), gone(1, 9.1, None, phase="saving", step=12), raised(2, 9.05, CLOSED)]
    cause = find_cause(exits)
    assert brief(cause) == ("timeout", 1, 74)
    assert cause.what == ("ranks 0 and 2 timed out waiting for rank 1, which is still running in step 12, while saving")
    assert "Timed out waiting" in cause.text
    both = [raised(0, 9.0, WAITED), gone(1, 9.1, None), gone(2, 9.1, None)]
    assert find_cause(both).what == "rank 0 timed out waiting for ranks 1 and 2, which are still running"
    assert find_cause(both[:1]).what == "rank 0 timed out waiting for other ranks"


@pytest.mark.parametrize(
    "words",
    [
        WAITED,
        f"{GLOO}pair.cc:1] Application timeout caused pair closure",
        "torch.distributed.DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cpu//0/0",
        "torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients joined.",
    ],
)
def test_a_timeout_is_the_cause_only_if_no_rank_exited(words: str) -> None:
    waiting = raised(0, 9.0, words)
    assert find_cause([waiting, gone(1, 9.1, None)]).kind == "timeout"
    assert find_cause([waiting, gone(1, 2.0, -9)]).kind == "signal"
    assert find_cause([waiting, gone(1, 2.0, 0)]).kind == "early-exit"


def test_an_abort_by_the_nccl_watchdog_is_a_timeout() -> None:
    tail = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 600000 milliseconds"
    assert brief(find_cause([gone(0, 9.0, -6, tail=tail), gone(1, 9.1, None)])) == ("timeout", 1, 74)
    assert find_cause([gone(0, 9.0, -6), gone(1, 9.1, None)]).what == "rank 0 was killed by SIGABRT"


def test_a_rank_that_had_finished_is_not_the_cause_of_later_failures() -> None:
    exits = [gone(0, 8.0, 0, phase="done"), raised(1, 5.0, CLOSED), gone(2, 9.0, None)]
    assert find_cause(exits).kind == "lost-connection"
    exits = [gone(0, 1.0, 0), gone(1, 5.0, -9), raised(2, 5.01, CLOSED)]
    assert brief(find_cause(exits)) == ("signal", 1, 137)


def test_an_oom_kill_is_distinguished_from_another_kill() -> None:
    exits = [gone(1, 5.0, -9, phase="saving", step=12), raised(0, 5.1, CLOSED)]
    cause = find_cause(exits, oom_killed={1}, several_nodes=True)
    assert brief(cause) == ("oom-killer", 1, 71)
    assert cause.what.startswith("rank 1 (node 0) was killed by the kernel's OOM killer in step 12, while saving")


@pytest.mark.parametrize(
    ("rank_exit", "kind"),
    [
        (raised(0, 1.0, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."), "gpu-memory"),
        (coded(0, 1.0, "train", "out-of-memory"), "gpu-memory"),
        (coded(0, 1.0, "train", "out-of-memory", what="Out of memory on rank 0 (cpu)."), "cpu-memory"),
        (raised(0, 1.0, TAKEN), "port-in-use"),
        (coded(0, 1.0, "world", "different-versions"), "version-mismatch"),
        (coded(0, 1.0, "data", "no-such-file"), "exception"),
        (coded(0, 1.0, "checkpoint", "not-saved", what=CLOSED), "lost-connection"),
        (raised(0, 1.0, "TimeoutError: timed out"), "exception"),
        (gone(0, 1.0, 1, tail=traceback("ValueError: of a program")), "exception"),
        (gone(0, 1.0, 1, tail=traceback(CLOSED)), "lost-connection"),
        (gone(0, 1.0, 137), "signal"),
    ],
)
def test_the_kind_follows_from_the_record_the_log_and_the_status(rank_exit: RankExit, kind: str) -> None:
    cause = find_cause([rank_exit])
    assert cause.kind == kind and cause.status == (137 if kind == "signal" else EXIT_STATUSES[cause.kind])


def test_a_coded_error_keeps_its_text_and_its_fix_is_shown_once() -> None:
    cause = find_cause([coded(0, 1.0, "world", "different-versions", what="They differ.")])
    assert (cause.text, cause.fix) == ("[world.different-versions] They differ.\n  why: because", "mend it")


@pytest.mark.parametrize("has_record", [True, False])
def test_an_error_that_a_rank_only_repeats_is_attributed_to_the_other_rank(has_record: bool) -> None:
    repeated = coded(1, 5.0, "checkpoint", "not-loaded", what="Saving failed on rank 0: ValueError: own")
    first = raised(0, 9.0, "ValueError: own") if has_record else gone(0, 9.0, None)
    cause = find_cause([first, repeated])
    assert brief(cause) == ("exception", 0, 1) and "ValueError: own" in cause.text


def test_a_lost_node_precedes_its_consequences() -> None:
    cause = find_cause([raised(0, 5.0, CLOSED)], lost_nodes={1: "ssh: connection closed\n"}, several_nodes=True)
    assert (cause.kind, cause.node, cause.status, cause.text) == ("node-lost", 1, 78, "ssh: connection closed")


def test_of_two_lost_nodes_the_first_is_named() -> None:
    assert find_cause([], lost_nodes={2: "gone", 0: "gone too"}).node == 2


def test_sys_exit_keeps_its_status() -> None:
    record = FailureRecord(0, 1.0, 7, "rank 0 called sys.exit(7)\n")
    assert brief(find_cause([RankExit(0, 0, 7, 1.0, record)])) == ("exit", 0, 7)


def test_a_long_list_of_ranks_is_shortened() -> None:
    exits = [gone(0, 5.0, -9), *(raised(rank, 5.1, CLOSED) for rank in range(1, 101))]
    assert "then ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 others lost" in find_cause(exits).what


def failed_at(rank: int, line: int, code: str = "") -> RankExit:
    parts = {"family": "world", "name": code, "what": "Odd.", "why": "", "fix": ""} if code else None
    text = f"[world.{code}] Odd." if code else traceback("ValueError: x")
    record = FailureRecord(rank, 1.0 + rank, 1, text, parts, "/home/me/train.py", line, "main", "trainer.train(data)")
    return RankExit(rank, 0, 1, record.time, record)


@pytest.mark.parametrize("code", ["", "different-calls"])
def test_the_line_of_the_users_code_follows_the_error_once_if_ranks_agree(code: str) -> None:
    cause = find_cause([failed_at(0, 17, code), failed_at(1, 17, code)])
    assert cause.text.splitlines()[-1] == "  at: /home/me/train.py:17, in main: trainer.train(data)"
    assert cause.text.count("train.py:17") == 1


def test_ranks_that_fail_alike_at_different_lines_show_each_line() -> None:
    cause = find_cause([failed_at(0, 17, "different-calls"), failed_at(1, 21, "different-calls"), failed_at(2, 30)])
    assert cause.text.splitlines()[1:] == [
        "  at: /home/me/train.py:17, in main: trainer.train(data) (rank 0)",
        "  at: /home/me/train.py:21, in main: trainer.train(data) (rank 1)",
    ]


def test_ranks_at_different_calls_show_the_lines_of_all() -> None:
    lost = failed_at(0, 16)
    assert lost.record is not None
    lost = replace(lost, time=9.0, record=replace(lost.record, time=9.0, text=traceback(CLOSED)))
    cause = find_cause([lost, failed_at(1, 17, "different-calls")])
    assert cause.text.splitlines()[1:] == [
        "  at: /home/me/train.py:16, in main: trainer.train(data) (rank 0)",
        "  at: /home/me/train.py:17, in main: trainer.train(data) (rank 1)",
    ]


ABORTED = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  [enforce fail at pair.cc:456] "
    "op.preamble.length <= op.nbytes. 180 vs 8. Received data size doesn't match expected size. Is there a distributed "
    'collective mismatch in your code?\nFatal Python error: Aborted\n  File "train.py", line 17 in <module>'
)


def test_an_abort_is_explained_by_what_gloo_said() -> None:
    cause = find_cause([raised(0, 9.1, CLOSED), gone(1, 9.0, -6, tail=ABORTED, phase="training", step=2)])
    assert brief(cause) == ("signal", 1, 134)
    assert cause.what.startswith("rank 1 received data of another collective than it waited for in step 2")
    assert "180 vs 8" in cause.text and "line 17" in cause.text
    assert "scheduler" not in cause.fix and "the same collectives in the same order on every rank" in cause.fix
    assert "scheduler" not in find_cause([gone(0, 9.0, -6, tail="terminate called without an active exception")]).fix
    raising = find_cause([raised(0, 9.0, "RuntimeError: Is there a distributed collective mismatch in your code?")])
    assert raising.kind == "exception" and "the same collectives" in raising.fix


def test_ranks_that_wait_for_each_other_at_different_lines_called_different_collectives() -> None:
    def waits(rank: int, line: int) -> RankExit:
        record = FailureRecord(rank, 9.0, 1, traceback(WAITED), None, "main.py", line, "main", f"call_{line}()")
        return RankExit(rank, 0, 1, 9.0, record)

    cause = find_cause([waits(0, 7), waits(1, 8)])
    assert cause.kind == "timeout"
    assert cause.what == "ranks 0 and 1 timed out waiting for each other, at different lines"
    assert "the same collectives" in cause.fix
    assert find_cause([waits(0, 7), waits(1, 7)]).what == "ranks 0 and 1 timed out waiting for other ranks"
