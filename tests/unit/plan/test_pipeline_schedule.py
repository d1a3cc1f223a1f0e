"""Where a row of layers is cut, how many micro-batches there are, and what stands still."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError
from paceline.plan.pipeline_schedule import (
    balanced_partition,
    bubble,
    choose_microbatches,
    explicit_partition,
    require_runnable,
    stages_a_rank,
)


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [9, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], [5, 1, 1, 1, 1, 8], [0, 0, 7]])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_dearest_stage_is_as_cheap_as_any_cut_makes_it(costs: list[float], stages: int) -> None:
    def dearest(lengths: list[int]) -> float:
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        return max(sum(costs[start:stop]) for start, stop in pairwise(ends))

    lengths = balanced_partition(costs, stages)
    assert len(lengths) == stages and sum(lengths) == len(costs) and min(lengths) >= 1
    every = [[0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), stages - 1)]
    assert dearest(lengths) == min(dearest([stop - start for start, stop in pairwise(ends)]) for ends in every)


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 stages") as found:
        balanced_partition([1.0, 1.0], 3)
    assert found.value.code == "layout.too-few-blocks"


def test_stages_by_hand_are_lengths_or_names() -> None:
    names = ["a", "b", "c", "d", "e"]
    assert explicit_partition([2, 3], names, 2) == [2, 3]
    assert explicit_partition(["a", "d"], names, 2) == [3, 2]
    assert explicit_partition(["d"], names, 2) == [3, 2]  # the first stage begins where the model does


@pytest.mark.parametrize("balance", [[2, 2], [5], [1, 2, 2], ["a", "f"], ["c", "b"], ["a", "b", "c"]])
def test_stages_by_hand_that_do_not_fit_are_refused(balance: list[int] | list[str]) -> None:
    with pytest.raises(LayoutError) as found:
        explicit_partition(balance, ["a", "b", "c", "d", "e"], 2)
    assert found.value.code == "layout.balance"


@pytest.mark.parametrize(
    ("schedule", "stages", "idle"),
    [("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved", 2, 3 / 19), ("zero-bubble", 1, 3 / 27)],
)
def test_what_stands_still_follows_the_formula(schedule: str, stages: int, idle: float) -> None:
    assert bubble(schedule, 4, stages, 8) == pytest.approx(idle)


def test_micro_batches_come_from_the_batch_and_say_what_they_cost() -> None:
    count, said = choose_microbatches(PipelineSection(), 4, 100)
    assert count == 8
    assert said.startswith("1f1b, 8 micro-batches (twice the ranks of the pipeline); 27% of a step stands still")
    assert choose_microbatches(PipelineSection(), 2, 3)[0] == 2  # no more than there are samples …
    assert choose_microbatches(PipelineSection(), 4, 1)[0] == 4  # … unless the schedule needs them
    assert choose_microbatches(PipelineSection(microbatches=5), 4, 100)[0] == 5


def test_micro_batches_that_a_schedule_cannot_run_are_refused() -> None:
    require_runnable(PipelineSection(schedule="gpipe", microbatches=1), 4)
    require_runnable(PipelineSection(schedule="1f1b", microbatches=5), 4)
    require_runnable(PipelineSection(schedule="interleaved", microbatches=8), 4)
    for schedule, count in (("1f1b", 3), ("interleaved", 9), ("zero-bubble", 2)):
        with pytest.raises(LayoutError) as found:
            require_runnable(PipelineSection(schedule=schedule, microbatches=count), 4)  # type: ignore[arg-type]
        assert found.value.code == "layout.microbatches"


def test_only_some_schedules_hold_several_stages_a_rank() -> None:
    assert [stages_a_rank(PipelineSection(schedule=name)) for name in ("1f1b", "interleaved", "zero-bubble")] == [
        1,
        2,
        1,
    ]  # type: ignore[arg-type]
    assert stages_a_rank(PipelineSection(schedule="zero-bubble", stages=3)) == 3
    with pytest.raises(LayoutError) as found:
        stages_a_rank(PipelineSection(schedule="gpipe", stages=2))
    assert found.value.code == "layout.stages-a-rank"
