"""How many micro-batches a pipeline runs, and its bubble."""

from __future__ import annotations

import pytest

from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError
from paceline.plan.pipeline_schedule import (
    bubble,
    choose_microbatches,
    require_runnable,
    stages_per_rank,
)


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
