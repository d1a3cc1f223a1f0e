"""What follows a failure: a restart, with a growing delay if training makes no progress, or the end."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from paceline.diagnose.exits import RankExit
from paceline.diagnose.hang.evidence import Hang
from paceline.launcher.restart_policy import CRASH_LOOP, GiveUp, Restart, Supervisor
from paceline.run.failures import FailureRecord


def killed(step: int | None, rank: int = 1) -> list[RankExit]:
    """Two ranks, one of them killed in that step."""
    exits = {0: RankExit(0, 0, None, 2.0, step=step), 1: RankExit(1, 0, None, 2.0, step=step)}
    return list({**exits, rank: RankExit(rank, 0, -signal.SIGKILL, 1.0, step=step)}.values())


def coded(family: str, name: str = "x") -> list[RankExit]:
    parts = {"family": family, "name": name, "what": "It is so.", "why": "", "fix": ""}
    return [RankExit(0, 0, 1, 1.0, FailureRecord(0, 1.0, 1, f"[{family}.{name}] It is so.", parts), step=3)]


def delays(*steps: int | None) -> list[float]:
    supervisor = Supervisor(100)
    decisions = [supervisor.decide(killed(step)) for step in steps]
    return [decision.delay for decision in decisions if isinstance(decision, Restart)]


def test_ranks_are_restarted_as_often_as_allowed() -> None:
    supervisor = Supervisor(2)
    decisions = [supervisor.decide(killed(step)) for step in (3, 9, 20)]
    assert [type(decision) for decision in decisions] == [Restart, Restart, GiveUp]
    assert supervisor.restarts == 2 and decisions[2].cause.rank == 1
    assert decisions[2].cause.status == 128 + signal.SIGKILL


def test_without_restarts_the_first_failure_is_the_end() -> None:
    assert isinstance(Supervisor(0).decide(killed(5)), GiveUp)


def test_a_hang_is_restarted_or_final_as_set() -> None:
    hang = Hang("missing", (1,), "rank 1 never entered all_reduce #4\nrank 0 has waited")
    stopped = [RankExit(rank, rank, None, 2.0, step=5) for rank in (0, 1)]
    restarted = Supervisor(1, "restart").decide(stopped, hang=hang)
    assert isinstance(restarted, Restart) and restarted.cause.what == hang.text
    for supervisor in (Supervisor(1, "stop"), Supervisor(0, "restart")):
        final = supervisor.decide(stopped, hang=hang)
        assert isinstance(final, GiveUp)
        assert (final.cause.kind, final.cause.status, final.cause.rank, final.cause.node) == ("hang", 79, 1, 1)
    lost = Supervisor(0, "stop").decide(stopped, hang=hang, lost_nodes={1: "no heartbeat"})
    assert lost.cause.kind == "node-lost"


def test_progress_resets_the_delay() -> None:
    assert delays(5, 9, 40) == [0.0, 0.0, 0.0]


def test_the_delay_doubles_without_progress() -> None:
    assert delays(*[None] * 9) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert delays(8, 7, 6, 30, 29) == [0.0, 1.0, 2.0, 0.0, 1.0]


def test_a_step_that_failed_three_times_is_not_retried_and_its_samples_are_named() -> None:
    supervisor = Supervisor(100)
    first, second = supervisor.decide(killed(7)), supervisor.decide(killed(7))
    assert isinstance(first, Restart) and first.suspect is None
    assert isinstance(second, Restart) and second.suspect == 7
    third = supervisor.decide(killed(7), suspects={0: [1, 2], 1: [30, 31]})
    assert isinstance(third, GiveUp) and third.cause.status == CRASH_LOOP
    assert "step 7 failed 3 times in a row" in third.cause.what
    assert third.cause.what.endswith("its samples were 30, 31")


def test_different_steps_and_failures_at_the_start_are_not_a_crash_loop() -> None:
    supervisor = Supervisor(100)
    decisions = [supervisor.decide(killed(step)) for step in (7, 7, 8, 7, 7, None, None, None, None)]
    assert all(isinstance(decision, Restart) for decision in decisions)


@pytest.mark.parametrize("family", ["config", "layout", "model"])
def test_permanent_errors_are_not_retried(family: str) -> None:
    assert isinstance(Supervisor(5).decide(coded(family)), GiveUp)


@pytest.mark.parametrize("family", ["checkpoint", "data", "train"])
def test_other_coded_errors_are_retried(family: str) -> None:
    assert isinstance(Supervisor(5).decide(coded(family)), Restart)


def test_a_version_mismatch_is_not_retried() -> None:
    decision = Supervisor(5).decide(coded("launch", "node-differs"))
    assert isinstance(decision, GiveUp) and decision.cause.kind == "version-mismatch"


def test_a_lost_node_leads_to_a_restart() -> None:
    decision: Any = Supervisor(1).decide(
        [RankExit(0, 0, None, 1.0, step=4)], lost_nodes={1: "b: gone"}, several_nodes=True
    )
    assert isinstance(decision, Restart) and (decision.cause.kind, decision.cause.node) == ("node-lost", 1)
