"""What follows a failure: another start, later and later where nothing gets on, or the end."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from paceline.diagnose.cause import RankExit
from paceline.launcher.restart_policy import CRASH_LOOP, GiveUp, Restart, Supervisor
from paceline.run.failures import FailureRecord


def killed(step: int | None, rank: int = 1) -> list[RankExit]:
    """Two ranks, of which one was killed in that step."""
    ends = {0: RankExit(0, 0, None, 2.0, step=step), 1: RankExit(1, 0, None, 2.0, step=step)}
    return list({**ends, rank: RankExit(rank, 0, -signal.SIGKILL, 1.0, step=step)}.values())


def coded(family: str, name: str = "x") -> list[RankExit]:
    parts = {"family": family, "name": name, "what": "It is so.", "why": "", "fix": ""}
    return [RankExit(0, 0, 1, 1.0, FailureRecord(0, 1.0, 1, f"[{family}.{name}] It is so.", parts), step=3)]


def delays(*steps: int | None) -> list[float]:
    supervisor = Supervisor(100)
    verdicts = [supervisor.judge(killed(step)) for step in steps]
    return [verdict.delay for verdict in verdicts if isinstance(verdict, Restart)]


def test_ranks_are_started_again_as_often_as_allowed() -> None:
    supervisor = Supervisor(2)
    verdicts = [supervisor.judge(killed(step)) for step in (3, 9, 20)]
    assert [type(verdict) for verdict in verdicts] == [Restart, Restart, GiveUp]
    assert supervisor.restarts == 2 and verdicts[2].cause.rank == 1
    assert verdicts[2].cause.status == 128 + signal.SIGKILL


def test_without_restarts_the_first_failure_is_the_end() -> None:
    assert isinstance(Supervisor(0).judge(killed(5)), GiveUp)


def test_where_training_gets_on_the_next_start_is_at_once() -> None:
    assert delays(5, 9, 40) == [0.0, 0.0, 0.0]


def test_where_it_does_not_the_next_start_comes_later_and_later() -> None:
    assert delays(*[None] * 9) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert delays(8, 7, 6, 30, 29) == [0.0, 1.0, 2.0, 0.0, 1.0]


def test_a_step_that_fails_three_times_is_not_tried_again_and_its_samples_are_named() -> None:
    supervisor = Supervisor(100)
    first, second = supervisor.judge(killed(7)), supervisor.judge(killed(7))
    assert isinstance(first, Restart) and first.suspect is None
    assert isinstance(second, Restart) and second.suspect == 7
    third = supervisor.judge(killed(7), suspects={0: [1, 2], 1: [30, 31]})
    assert isinstance(third, GiveUp) and third.cause.status == CRASH_LOOP
    assert "step 7 has now failed 3 times in a row" in third.cause.what
    assert third.cause.what.endswith("its samples there were 30, 31")


def test_different_steps_and_failures_at_the_start_are_no_crash_loop() -> None:
    supervisor = Supervisor(100)
    verdicts = [supervisor.judge(killed(step)) for step in (7, 7, 8, 7, 7, None, None, None, None)]
    assert all(isinstance(verdict, Restart) for verdict in verdicts)


@pytest.mark.parametrize("family", ["config", "layout", "model"])
def test_what_the_next_start_would_meet_again_is_not_tried_again(family: str) -> None:
    assert isinstance(Supervisor(5).judge(coded(family)), GiveUp)


@pytest.mark.parametrize("family", ["checkpoint", "data", "train"])
def test_other_errors_with_a_code_may_be_accidents(family: str) -> None:
    assert isinstance(Supervisor(5).judge(coded(family)), Restart)


def test_nodes_of_different_versions_are_not_started_again() -> None:
    verdict = Supervisor(5).judge(coded("launch", "versions-differ"))
    assert isinstance(verdict, GiveUp) == (verdict.cause.kind == "version-mismatch")


def test_a_lost_node_is_an_accident() -> None:
    verdict: Any = Supervisor(1).judge(
        [RankExit(0, 0, None, 1.0, step=4)], lost_nodes={1: "b: gone"}, several_nodes=True
    )
    assert isinstance(verdict, Restart) and (verdict.cause.kind, verdict.cause.node) == ("node-lost", 1)
