"""Partition a sequence of layers into consecutive parts (pipeline stages, or the devices of `strategy: split`), and the
schedules in which stages run micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from paceline.config.sections import PipelineSection
from paceline.errors import LayoutError, did_you_mean
from paceline.plan.layout import FROM_SETTINGS
from paceline.text import plural


def balanced_partition(costs: Sequence[float], parts: int) -> list[int]:
    """Lengths of `parts` consecutive non-empty parts that minimize the highest cost of a part.

    There must be at least as many costs as parts.
    """
    total = [0.0, *accumulate(costs)]
    count = len(costs)
    best = [[total[end] for end in range(count + 1)]]  # [k][end]: highest cost of k + 1 parts of the first `end`
    starts = [[0] * (count + 1)]
    for k in range(1, parts):
        row, begins = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(k + 1, count + 1):
            row[end], begins[end] = min(
                (max(best[k - 1][start], total[end] - total[start]), start) for start in range(k, end)
            )
        best.append(row)
        starts.append(begins)
    lengths, end = [], count
    for k in reversed(range(parts)):
        start = starts[k][end]
        lengths.append(end - start)
        end = start
    return lengths[::-1]


def parse_balance(
    balance: Sequence[int] | Sequence[str], names: Sequence[str], parts: int, *, is_pipeline: bool
) -> list[int]:
    """The lengths given by a recipe's `balance:`, as numbers of layers or as the names of the first layers of parts.

    The parts are stages of a pipeline, or else what the devices of a split hold.
    """
    key = "pipeline.balance" if is_pipeline else "split.balance"
    limits = f"{len(names)} layers" + (f", from {names[0]} to {names[-1]}" if names else "")
    if all(isinstance(entry, int) for entry in balance):
        lengths = [int(entry) for entry in balance]
    else:
        for entry in balance:
            if entry not in names:
                what = f"{key}: unknown layer {entry!r}; {did_you_mean(str(entry), names)}"
                raise LayoutError("balance" if is_pipeline else "no-such-layer", what, fix=f"the model has {limits}")
        begins = [names.index(str(entry)) for entry in balance]
        begins = begins if begins[:1] == [0] else [0, *begins]
        lengths = [end - start for start, end in zip(begins, [*begins[1:], len(names)], strict=True)]
    if len(lengths) != parts or sum(lengths) != len(names) or min(lengths) < 1:
        what = f"{key} is {list(balance)}: parts of {lengths} layers. Expected {parts} parts of {limits}."
        fix = f"set {parts} numbers that sum to {len(names)}, or the name of the first layer of each part, in order"
        raise LayoutError("balance" if is_pipeline else "split-balance", what, fix=fix)
    return lengths


ONE_STAGE = ("gpipe", "1f1b")


def stages_per_rank(settings: PipelineSection) -> int:
    if settings.schedule in ONE_STAGE and (settings.stages or 1) > 1:
        raise LayoutError(
            "stages-a-rank",
            f"pipeline.stages is {settings.stages}, but {settings.schedule} supports one stage per rank.",
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
            count, reason = (max(ranks, samples // ranks * ranks), f"{plural(samples, 'sample')} per rank")
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
            fix=f"use a pipeline of at most {plural(layers, 'stage')} (ranks × pipeline.stages), or a deeper model",
        )
