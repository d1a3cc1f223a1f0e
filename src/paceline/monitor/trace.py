"""Split the time of a trace into compute, communication and idle time.

    |-- compute --|-- compute --|   idle   |
           |-- communication ------|
                                |..| exposed: no concurrent compute

`compute`, `exposed` and `idle` add up to the total; communication that overlaps with compute is hidden. On a GPU,
compute is kernels and copies, and communication is NCCL kernels. On CPU, compute is torch operations on the thread of
the training loop, and communication is that of gloo, which runs on other threads.

On CPU, waiting for a collective has no span of its own: it is a gap or, inside a backward function (whose hooks may
wait), time without an operation. Both count as communication while a collective is in progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import DeviceType

BEGIN, END = "paceline: profile begins", "paceline: profile ends"

Interval = tuple[float, float]

_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "c10d::", "_c10d_functional::", "record_param_comms")
_BACKWARD_SCOPE = 1


@dataclass(frozen=True)
class Span:
    """An event of the trace; times are microseconds."""

    name: str
    start: float
    end: float
    thread: int = 0
    on_device: bool = False
    annotation: bool = False  # a user's label for a range of code, not an operation
    backward: bool = False  # a node of the backward pass; its hooks run inside it

    @property
    def collective(self) -> bool:
        return is_collective(self.name) or (self.on_device and "nccl" in self.name.lower())


@dataclass(frozen=True)
class TimeSplit:
    """Microseconds. whole = compute + exposed + idle."""

    whole: float
    compute: float
    communication: float
    exposed: float

    @property
    def idle(self) -> float:
        return max(0.0, self.whole - self.compute - self.exposed)


def is_collective(name: str) -> bool:
    return name.startswith(_COLLECTIVES)


def spans(events: Iterable[Any]) -> list[Span]:
    """torch.profiler's events as spans."""
    return [
        Span(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.thread,
            on_device=event.device_type != DeviceType.CPU,
            annotation=event.is_user_annotation,
            backward=event.scope == _BACKWARD_SCOPE or event.name.startswith("autograd::engine::"),
        )
        for event in events
    ]


def split(trace: list[Span]) -> TimeSplit:
    """Split the time between the BEGIN and END spans of the loop's thread."""
    begin = next(span for span in trace if span.name == BEGIN and not span.on_device)
    end = next(span for span in trace if span.name == END and not span.on_device)
    window = [(begin.end, end.start)]
    if any(span.on_device and not span.annotation for span in trace):
        compute, communication = _on_device(trace)
    else:
        compute, communication = _on_thread(trace, begin.thread)
    compute, communication = _common(compute, window), _common(communication, window)
    return TimeSplit(
        _length(window), _length(compute), _length(communication), _length(_without(communication, compute))
    )


def _on_device(trace: list[Span]) -> tuple[list[Interval], list[Interval]]:
    work = [span for span in trace if span.on_device and not span.annotation]
    compute = _union(span for span in work if not span.collective)
    # gloo transfers GPU tensors on its own threads.
    communication = _union(
        span for span in trace if span.collective and (span.on_device or span.name.startswith("gloo:"))
    )
    return compute, communication


def _on_thread(trace: list[Span], thread: int) -> tuple[list[Interval], list[Interval]]:
    collectives = [span for span in trace if span.collective]
    communication = _union(collectives)
    own = [span for span in trace if span.thread == thread and not span.annotation and not span.collective]
    operations = _union(span for span in own if not span.backward)
    backward = _without(_union(span for span in own if span.backward), communication)
    called = _union(span for span in collectives if span.thread == thread)
    return _without(_merged(operations + backward), called), communication


def _union(parts: Iterable[Span]) -> list[Interval]:
    return _merged([(span.start, span.end) for span in parts])


def _merged(parts: list[Interval]) -> list[Interval]:
    """Sort intervals and merge overlapping ones. All functions below expect and return such lists."""
    merged: list[Interval] = []
    for start, end in sorted(parts):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(parts: list[Interval]) -> float:
    return sum(end - start for start, end in parts)


def _without(parts: list[Interval], taken: list[Interval]) -> list[Interval]:
    """The difference of `parts` and `taken`."""
    left: list[Interval] = []
    first = 0
    for start, end in parts:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        at = first
        while at < len(taken) and taken[at][0] < end:
            if taken[at][0] > start:
                left.append((start, taken[at][0]))
            start = taken[at][1]
            at += 1
        if start < end:
            left.append((start, end))
    return left


def _common(parts: list[Interval], window: list[Interval]) -> list[Interval]:
    return _without(parts, _without(parts, window))
