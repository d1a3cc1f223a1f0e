"""Pipeline schedules: the number of micro-batches, and the bubble.

The ranks of a pipeline are idle while it fills and drains. With p ranks, m micro-batches and v stages per rank:

| schedule    | bubble                         | reason                                                               |
|-------------|--------------------------------|----------------------------------------------------------------------|
| gpipe       | (p - 1) / (m + p - 1)          | the last rank waits for p - 1 others, twice                          |
| 1f1b        | (p - 1) / (m + p - 1)          | the same, but activations of p micro-batches instead of m in memory  |
| interleaved | (p - 1) / (v m + p - 1)        | stages are v times shorter                                           |
| zero-bubble | (p - 1) / (3 v m + p - 1)      | weight gradients, a third of the work, are computed while waiting    |
"""

from __future__ import annotations

from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError
from paceline.plan.derived import FROM_SETTINGS
from paceline.text import plural

ONE_STAGE = ("gpipe", "1f1b")


def stages_per_rank(settings: PipelineSection) -> int:
    if settings.schedule in ONE_STAGE and (settings.stages or 1) > 1:
        raise LayoutError(
            "stages-a-rank",
            f"pipeline.stages is {settings.stages}, but {settings.schedule} supports one stage per rank.",
            fix="remove pipeline.stages, or set pipeline.schedule: interleaved (or zero-bubble)",
        )
    return settings.stages or (2 if settings.schedule == "interleaved" else 1)


def bubble(schedule: str, ranks: int, stages: int, microbatches: int) -> float:
    """The fraction of a step in which a rank is idle, if all stages take the same time."""
    work = {"gpipe": 1, "1f1b": 1, "interleaved": stages, "zero-bubble": 3 * stages}[schedule] * microbatches
    return (ranks - 1) / (work + ranks - 1)


def choose_microbatches(settings: PipelineSection, ranks: int, samples: int) -> tuple[int, str]:
    """The number of micro-batches for `samples` samples per rank, and a description of the schedule."""
    stages = stages_per_rank(settings)
    if settings.microbatches is not None:
        count, reason = settings.microbatches, FROM_SETTINGS
    else:
        count, reason = 2 * ranks, "2 per pipeline rank"
        if samples < count:
            count, reason = (
                max(ranks, samples // ranks * ranks),
                f"{plural(samples, 'sample')} per rank",
            )
    idle = bubble(settings.schedule, ranks, stages, count)
    return count, f"{settings.schedule}, {count} micro-batches ({reason}); pipeline bubble: {idle:.0%} of each step"


def require_runnable(settings: PipelineSection, ranks: int) -> None:
    """Reject micro-batch counts that torch's schedules do not support.

    Schedules with several stages per rank process micro-batches in rounds of one per rank.
    """
    schedule, count = settings.schedule, settings.microbatches
    if count is None or schedule == "gpipe":
        return
    if count >= ranks and (schedule == "1f1b" or count % (count // ranks) == 0):
        return
    raise LayoutError(
        "microbatches",
        f"pipeline.microbatches is {count}, which {schedule} does not support on {ranks} ranks.",
        why="it needs at least one per rank" + ("" if schedule == "1f1b" else ", in rounds of equal length"),
        fix=f"set it to a multiple of {ranks}, or remove it",
    )


def require_enough(layers: int, stages: int) -> None:
    if layers < stages:
        raise LayoutError(
            "too-few-blocks",
            f"The model has {plural(layers, 'layer')} with parameters, but the pipeline has {plural(stages, 'stage')}.",
            why="every stage needs at least one layer",
            fix=f"use a pipeline of at most {plural(layers, 'stage')} (ranks × pipeline.stages), or a deeper model",
        )
