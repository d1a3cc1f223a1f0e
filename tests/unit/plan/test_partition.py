"""Where a sequence of layers is partitioned, by cost or by hand."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError
from paceline.plan.partition import (
    balanced_partition,
    bubble,
    choose_microbatches,
    parse_balance,
    require_runnable,
    stages_per_rank,
)

NAMES = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("costs", [[1, 1, 1, 1], [9, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6], [5, 1, 1, 1, 1, 8], [0, 0, 7]])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_highest_cost_of_a_part_is_the_lowest_possible(costs: list[float], parts: int) -> None:
    def highest(lengths: list[int]) -> float:
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        return max(sum(costs[start:stop]) for start, stop in pairwise(ends))

    lengths = balanced_partition(costs, parts)
    assert len(lengths) == parts and sum(lengths) == len(costs) and min(lengths) >= 1
    every = [[0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), parts - 1)]
    assert highest(lengths) == min(highest([stop - start for start, stop in pairwise(ends)]) for ends in every)


@pytest.mark.parametrize(
    ("sizes", "parts", "lengths"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 9], 3, [1, 2, 1]),
        ([5, 1, 1, 1, 1, 5], 3, [1, 4, 1]),
    ],
)
def test_parts_are_even_and_none_is_empty(sizes: list[int], parts: int, lengths: list[int]) -> None:
    assert balanced_partition(sizes, parts) == lengths


def parsed(balance: list[int] | list[str]) -> list[int]:
    return parse_balance(balance, NAMES, 2, is_pipeline=False)


def test_a_balance_is_lengths_or_the_names_at_which_parts_begin() -> None:
    assert parsed([2, 3]) == [2, 3]
    assert parsed(["a", "d"]) == [3, 2]
    assert parsed(["d"]) == [3, 2]  # the first part begins with the model


@pytest.mark.parametrize("balance", [[2, 2], [5], [1, 2, 2], ["c", "b"], ["a", "b", "c"], ["a"]])
def test_a_balance_that_does_not_fit_is_refused(balance: list[int] | list[str]) -> None:
    with pytest.raises(LayoutError, match=r"split-balance.*Expected 2 parts of 5 layers, from a to e"):
        parsed(balance)


def test_a_balance_names_existing_layers() -> None:
    with pytest.raises(LayoutError, match=r"no-such-layer.*unknown layer 'f'"):
        parsed(["a", "f"])


@pytest.mark.parametrize(
    ("schedule", "stages", "idle"),
    [("gpipe", 1, 3 / 11), ("1f1b", 1, 3 / 11), ("interleaved", 2, 3 / 19), ("zero-bubble", 1, 3 / 27)],
)
def test_what_stands_still_follows_the_formula(schedule: str, stages: int, idle: float) -> None:
    assert bubble(schedule, 4, stages, 8) == pytest.approx(idle)


def test_micro_batches_come_from_the_batch_and_say_what_they_cost() -> None:
    count, said = choose_microbatches(PipelineSection(), 4, 100)
    assert count == 8
    assert said.startswith("1f1b, 8 micro-batches (2 per pipeline rank); pipeline bubble: 27% of each step")
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
    assert [stages_per_rank(PipelineSection(schedule=name)) for name in ("1f1b", "interleaved", "zero-bubble")] == [
        1,
        2,
        1,
    ]  # type: ignore[arg-type]
    assert stages_per_rank(PipelineSection(schedule="zero-bubble", stages=3)) == 3
    with pytest.raises(LayoutError) as found:
        stages_per_rank(PipelineSection(schedule="gpipe", stages=2))
    assert found.value.code == "layout.stages-a-rank"
