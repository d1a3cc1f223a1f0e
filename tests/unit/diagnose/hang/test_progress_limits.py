"""When a standstill is reported, and when not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.diagnose.hang.progress_limits import NoProgress, Observation, ProgressLimits

POLL = 0.25


class Run:
    """Ranks whose progress is written down in advance, and their observer."""

    def __init__(self, world: int = 2) -> None:
        self.patience, self.now = ProgressLimits(), 0.0
        self.ranks = {rank: Observation("training", counters=(0,)) for rank in range(world)}
        self.reports: list[tuple[float, NoProgress]] = []
        self._next = 0.0

    def wait(self, seconds: float) -> None:
        """Let time pass, without any progress."""
        end = self.now + seconds
        while self._next <= end:
            if report := self.patience.observe(self._next, self.ranks):
                self.reports.append((self._next, report))
            self._next += POLL
        self.now = end

    def move(self, ranks: Iterable[int] | None = None, **values: object) -> None:
        """Let ranks progress by a micro-batch."""
        for rank in self.ranks if ranks is None else ranks:
            seen = self.ranks[rank]
            self.ranks[rank] = seen._replace(
                counters=(seen.counters[0] + 1,), **{"waits": False, "seems_to_wait": False, **values}
            )

    def step(self, seconds: float, micros: int = 1) -> None:
        for _ in range(micros):
            self.wait(seconds / micros)
            self.move()
        self.move(step=self.ranks[0].step + 1)

    def steps(self, number: int, seconds: float) -> None:
        for _ in range(number):
            self.step(seconds)

    def during(self, phase: str, seconds: float) -> None:
        self.move(phase=phase)
        self.wait(seconds)
        self.move(phase="training")

    def reported_after(self, seconds: float, **values: object) -> float:
        """How long a standstill lasts until it is reported. Ranks wait for their data unless told otherwise."""
        for rank, seen in self.ranks.items():
            self.ranks[rank] = seen._replace(
                **{"seems_to_wait": not any(each.waits for each in self.ranks.values()), **values}
            )
        start, before = self.now, len(self.reports)
        self.wait(seconds)
        assert len(self.reports) > before
        return self.reports[before][0] - start


@pytest.mark.parametrize("step", [0.001, 0.02, 0.1])
def test_short_steps_are_waited_for_two_seconds(step: float) -> None:
    run = Run()
    run.steps(int(5 / step) + 6, step)
    assert not run.reports
    assert run.reported_after(10) < 3
    [(_, report)] = run.reports
    assert report.phase == "training"
    assert report.limit < 2.2


def test_the_limit_follows_the_step() -> None:
    run = Run()
    run.steps(10, 1.0)
    assert 20 < run.reported_after(60) < 22
    assert run.reports[0][1].why == "20 × the median step of 1 s"


def test_long_steps_are_waited_for_a_minute_longer() -> None:
    run = Run()
    run.steps(10, 30.0)
    assert 90 < run.reported_after(600) < 92
    assert run.reports[0][1].why == "the median step of 30.0 s + 60 s"


def test_the_limit_follows_a_machine_that_becomes_slower_and_forgets_an_outlier() -> None:
    run = Run()
    run.steps(200, 0.1)
    run.steps(60, 1.0)
    assert run.patience.limit("training").seconds == pytest.approx(20, rel=0.1)
    run.step(40)
    run.step(1.0)
    assert not run.reports
    assert run.patience.limit("training").seconds == pytest.approx(80, rel=0.1)
    run.steps(52, 0.5)
    assert run.patience.limit("training").seconds == pytest.approx(10, rel=0.2)


def test_micro_batches_are_progress() -> None:
    run = Run()
    for _ in range(6):
        run.step(0.1)
    run.step(30, micros=30)
    assert not run.reports


def test_a_resumed_run_begins_at_any_step() -> None:
    run = Run()
    run.move(step=100_000)
    run.steps(10, 0.1)
    assert run.patience.limit("training").seconds == pytest.approx(2, abs=1)


def test_few_steps_are_no_history() -> None:
    run = Run()
    run.steps(2, 0.1)
    assert 60 < run.reported_after(70) < 61


def test_steps_are_counted_from_the_first_one() -> None:
    run = Run()
    run.move(phase="first step", step=1000)
    run.wait(5.0)
    run.move(phase="training", step=1001)
    run.steps(4, 0.1)
    assert run.reported_after(10) < 3


def test_steps_between_two_observations_are_short() -> None:
    run = Run()
    run.move(phase="load")
    run.wait(5.0)
    run.move(phase="training", step=1005)  # of a resumed run
    assert run.reported_after(10) < 6


def test_saves_have_their_own_history() -> None:
    run = Run()
    for _ in range(5):
        run.steps(10, 0.1)
        run.during("saving", 8.0)
    assert not run.reports
    assert run.patience.limit("training").seconds < 3
    assert run.patience.limit("saving") == (pytest.approx(80, rel=0.1), "10 × the longest save of 8.2 s")
    run.move(phase="saving")
    assert 80 < run.reported_after(200) < 86


def test_an_evaluation_progresses_with_its_batches() -> None:
    run = Run()
    run.steps(10, 0.1)
    for _ in range(100):
        run.move(phase="evaluating")
        run.wait(1.0)
    assert not run.reports
    assert 19 < run.reported_after(100) < 26


def test_ranks_that_wait_for_an_evaluation_of_others_are_patient() -> None:
    run = Run()
    run.steps(10, 0.1)
    run.move([1], waits=True)
    for _ in range(40):
        run.move([0], phase="evaluating")
        run.wait(1.0)
    assert not run.reports


def test_a_rank_that_is_stuck_is_reported_although_another_one_runs_ahead() -> None:
    run = Run()
    run.steps(20, 0.1)
    run.ranks[1] = run.ranks[1]._replace(seems_to_wait=True)
    for _ in range(30):
        run.move([0])
        run.wait(0.1)
    assert run.reports[0][0] - 2.0 < 2.6


def test_all_ranks_may_run_code_of_the_user_for_long_and_end_it_one_after_the_other() -> None:
    run = Run(3)
    run.steps(20, 0.1)
    run.wait(50)  # a validation that nobody counts
    run.move([1], waits=True)
    run.wait(1)
    run.move([2], waits=True)
    run.wait(0.9)
    run.step(0.1)
    assert not run.reports
    run.steps(200, 0.1)  # until that is forgotten
    assert 60 < run.reported_after(70, seems_to_wait=False) < 61
    assert run.reports[0][1].why.startswith("no rank waits for others or for data")


def test_a_rank_that_others_wait_for_is_reported_soon() -> None:
    run = Run(3)
    run.steps(20, 0.1)
    run.move([0, 2], waits=True)
    assert run.reported_after(10, seems_to_wait=False) < 3


@pytest.mark.parametrize(("phase", "limit"), [("start", 300), ("rendezvous", 300), ("load", 600), ("first step", 600)])
def test_the_start_has_limits_of_its_own(phase: str, limit: float) -> None:
    run = Run()
    run.move(phase=phase)
    assert limit < run.reported_after(700) < limit + 2


def script(**values: object) -> Run:
    run = Run()
    run.move(phase="", **values)
    return run


def test_a_script_without_a_trainer_may_stand_still_unless_a_rank_waits() -> None:
    run = script()
    for _ in range(20):
        run.wait(0.1)
        run.move()
    run.wait(1000)
    assert not run.reports
    run.move([1], waits=True)
    assert run.reported_after(60) < 12


def test_a_wait_of_a_script_makes_it_more_patient() -> None:
    run = script()
    for _ in range(20):
        run.wait(0.1)
        run.move()
    run.move([1], waits=True)
    run.wait(8)
    run.move()
    assert not run.reports
    run.wait(0.5)
    run.move([1], waits=True)
    assert 15 < run.reported_after(60) < 20


def test_ranks_that_have_returned_are_not_waited_for() -> None:
    run = Run()
    run.steps(10, 0.1)
    run.move(phase="returned")
    run.wait(1000)
    assert not run.reports


def test_a_standstill_is_reported_again_while_it_lasts_and_its_end_is_told() -> None:
    run = Run()
    run.steps(20, 0.1)
    run.reported_after(1000)
    (_, first), (_, again), *others = run.reports
    assert 2 < first.seconds < 3 and not first.lasts
    assert 20 < again.seconds < 25 and again.lasts and len(others) < 50
    del run.reports[2:]
    assert run.patience.continued() is None
    run.step(0.1)
    run.wait(POLL)
    assert run.patience.continued() == pytest.approx(1000, rel=0.01)
    assert run.patience.continued() is None
    run.steps(200, 0.1)  # until that standstill is forgotten
    assert run.reported_after(10) < 3 and not run.reports[2][1].lasts


def test_an_observer_that_was_stopped_too_does_not_count_that_time() -> None:
    patience, ranks = ProgressLimits(), {0: Observation("training")}
    for number in range(40):
        patience.observe(0.1 * number, {0: Observation("training", step=number)})
        ranks = {0: Observation("training", step=number)}
    assert patience.observe(3600.0, ranks) is None


def test_ranks_that_get_no_cpu_are_not_stuck() -> None:
    """Another process has the CPU for a minute; then a rank really stands still, on a CPU that it has to share."""
    run = Run()
    run.steps(20, 0.1)
    for _ in range(240):
        run.wait(POLL)
        for rank, seen in run.ranks.items():
            run.ranks[rank] = seen._replace(seems_to_wait=True, kept_waiting=seen.kept_waiting + POLL)
    assert not run.reports
    assert run.reported_after(10) < 3


@given(
    step=st.floats(0.001, 5.0),
    events=st.lists(st.sampled_from(["step"] * 6 + ["slow", "save", "evaluate", "late rank"]), max_size=60),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_healthy_runs_never_alarm(step: float, events: list[str], data: st.DataObject) -> None:
    """Steps that vary by half, ten-fold slow ones, saves, evaluations, and ranks that come late."""
    run = Run(3)
    run.steps(10, step)
    vary = st.floats(0.7, 1.5)
    acts: Mapping[str, Callable[[float], None]] = {
        "step": lambda factor: run.step(step * factor),
        "slow": lambda factor: run.step(10 * step),
        "save": lambda factor: run.during("saving", 10 * factor),
        "evaluate": lambda factor: run.during("evaluating", 5 * factor),
        "late rank": lambda factor: late(run, 5 * step * factor),
    }
    for event in events:
        acts[event](data.draw(vary))
    assert not run.reports


def late(run: Run, seconds: float) -> None:
    """Ranks 1 and 2 wait for rank 0 in a step."""
    run.move([1, 2], waits=True)
    run.step(seconds)
