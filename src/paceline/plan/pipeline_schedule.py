"""The arithmetic of a pipeline: how many micro-batches go through it, and its bubble.

A pipeline of p ranks stands partly still while it fills and drains. With m micro-batches and v stages a rank:

| schedule    | idle part                      | because                                                              |
|-------------|--------------------------------|----------------------------------------------------------------------|
| gpipe       | (p - 1) / (m + p - 1)          | the last rank waits for p - 1 others, twice                          |
| 1f1b        | (p - 1) / (m + p - 1)          | the same, with activations of p micro-batches instead of m           |
| interleaved | (p - 1) / (v m + p - 1)        | stages are v times shorter, so filling is                            |
| zero-bubble | (p - 1) / (3 v m + p - 1)      | gradients of weights, a third of the work, are computed while waiting |
"""

from __future__ import annotations

from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError
from paceline.text import plural

ONE_STAGE = ("gpipe", "1f1b")


def stages_a_rank(settings: PipelineSection) -> int:
    if settings.schedule in ONE_STAGE and (settings.stages or 1) > 1:
        raise LayoutError(
            "stages-a-rank",
            f"pipeline.stages is {settings.stages}, but {settings.schedule} runs one stage a rank.",
            fix="leave pipeline.stages out, or set pipeline.schedule: interleaved (or zero-bubble)",
        )
    return settings.stages or (2 if settings.schedule == "interleaved" else 1)


def bubble(schedule: str, ranks: int, stages: int, microbatches: int) -> float:
    """The part of a step in which a rank stands still, where all stages take the same time."""
    work = {"gpipe": 1, "1f1b": 1, "interleaved": stages, "zero-bubble": 3 * stages}[schedule] * microbatches
    return (ranks - 1) / (work + ranks - 1)


def choose_microbatches(settings: PipelineSection, ranks: int, samples: int) -> tuple[int, str]:
    """Into how many parts a rank's `samples` are cut, and a word on it."""
    stages = stages_a_rank(settings)
    if settings.microbatches is not None:
        count, reason = settings.microbatches, "as set"
    else:
        count, reason = 2 * ranks, "twice the ranks of the pipeline"
        if samples < count:
            count, reason = max(ranks, samples // ranks * ranks), f"a rank has {samples} samples at once"
    idle = bubble(settings.schedule, ranks, stages, count)
    return count, (
        f"{settings.schedule}, {count} micro-batches ({reason}); "
        f"{idle:.0%} of a step stands still while the pipeline fills and drains"
    )


def require_runnable(settings: PipelineSection, ranks: int) -> None:
    """What torch's schedules can't run. Those of several stages a rank go in rounds of as many as there are ranks."""
    schedule, count = settings.schedule, settings.microbatches
    if count is None or schedule == "gpipe":
        return
    if count >= ranks and (schedule == "1f1b" or count % (count // ranks) == 0):
        return
    raise LayoutError(
        "microbatches",
        f"pipeline.microbatches is {count}, with which {schedule} can't run on {ranks} ranks.",
        why="there have to be as many as ranks" + ("" if schedule == "1f1b" else ", in rounds of the same length"),
        fix=f"set it to a multiple of {ranks}, or leave it out",
    )


def require_enough(layers: int, stages: int) -> None:
    if layers < stages:
        raise LayoutError(
            "too-few-blocks",
            f"The model has {plural(layers, 'layer')} with weights, the pipeline {stages} stages.",
            why="every stage needs one",
            fix=f"use a pipeline of at most {plural(layers, 'stage')} (ranks × pipeline.stages), or a deeper model",
        )
