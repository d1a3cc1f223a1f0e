from __future__ import annotations

import threading

import pytest

from paceline.doctor import all_reduce_check
from paceline.doctor.all_reduce_check import AllReduceResult, all_reduce, judge_all_reduce
from worlds import ranks

GOOD = AllReduceResult("gloo", 0.001, 0.1)


@ranks(2)
def test_ranks_that_can_communicate_report_two_times() -> None:
    result = all_reduce("cpu", None)
    assert result.error == "" and result.backend == "gloo"
    assert result.small > 0 and result.large > 0


def test_a_backend_that_cannot_start_is_an_error_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = all_reduce("cpu", "nccl")
    assert "nccl" in result.error and not result.is_stuck


def test_one_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(all_reduce_check, "_run", lambda *_: ended.wait())
    try:
        result = all_reduce("cpu", None, seconds=0.1)
    finally:
        ended.set()
    assert result.is_stuck and "0.1 s" in result.error


def test_the_slowest_node_counts() -> None:
    finding = judge_all_reduce(["a", "b"], [GOOD, AllReduceResult("gloo", 0.002, 0.05)])
    assert (finding.status, finding.what) == ("ok", "2 nodes, gloo: 2.0 ms for one number, 100 ms for 16 MiB")


def test_the_node_that_fails_first_is_named_with_its_error() -> None:
    waited = AllReduceResult(error="timed out", took=20.0)
    finding = judge_all_reduce(["a", "b", "c"], [waited, AllReduceResult(error="no such device", took=0.1), GOOD])
    assert (finding.status, finding.host) == ("fail", "b")
    assert finding.what == "An all-reduce fails first on b: no such device"
