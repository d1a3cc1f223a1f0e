"""Profile some steps: the most expensive operations, and the overlap of communication with compute.

    profiler = Profiler(config.profile, run, rank)
    profiler.step(0)                        # before the loop, so that step 1 can be profiled
    for …: text = profiler.step(finished)   # after each step; returns a report after the last profiled one
    text = profiler.close()                 # if training ended earlier

The trace in the run folder can be viewed with ui.perfetto.dev or chrome://tracing. Profiling slows down small steps, so
percentages are more reliable than milliseconds.

The time of a trace is split into compute, communication and idle time:

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

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.config.sections import ProfileSection
from paceline.run import regular_files
from paceline.run.folder import RunFolder

_ROWS = 12
_NAME_WIDTH = 50
# CUDA runtime calls; the kernels that they launch are listed under the name of the operation.
_RUNTIME = ("cuda", "cuLaunch", "Activity Buffer Request", "INVALID")
BEGIN, END = "paceline: profile begins", "paceline: profile ends"
Interval = tuple[float, float]
_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "c10d::", "_c10d_functional::", "record_param_comms")
_BACKWARD_SCOPE = 1


class Profiler:
    def __init__(self, settings: ProfileSection, run: RunFolder | None, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._path = None if run is None else run.trace(rank)
        self._split_path = None if run is None else run.profile_split(rank)
        self._trace: profile | None = None
        self._begin = self._end = self._finished = 0
        self._done = False
        self.split: TimeSplit | None = None  # of all profiled steps

    def step(self, finished: int) -> str | None:
        """Update the number of finished steps. Returns the report after the last profiled step."""
        self._finished = finished
        first, after = self._settings.steps
        if self._trace is not None:
            return self.close() if finished >= self._end else None
        if not self._done and finished >= first - 1:
            # A run resumed after these steps profiles the same number of the following ones.
            self._begin, self._end = finished, after - 1 if finished < after - 1 else finished + after - first
            self._start()
        return None

    def close(self) -> str | None:
        """Stop profiling and return the report; None if profiling is not active."""
        if self._trace is None:
            return None
        trace, self._trace, self._done = self._trace, None, True
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        with record_function(END):
            pass
        trace.stop()
        steps = self._finished - self._begin
        if not steps:
            return None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with regular_files.replacing(self._path) as partial:
                trace.export_chrome_trace(str(partial))
        self.split = split_time(spans_of(trace.events()))
        if self._split_path is not None:
            regular_files.replace(self._split_path, json.dumps(_values(trace, self.split, steps)).encode())
        return self._text(trace, self.split, steps)

    def _start(self) -> None:
        # is_initialized, because other queries initialize CUDA.
        gpu = torch.cuda.is_initialized()
        self._trace = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])],
            record_shapes=self._settings.shapes,
            profile_memory=self._settings.memory,
            acc_events=True,
        )
        if gpu:
            torch.cuda.synchronize()
        with _quiet_kineto():
            self._trace.start()
        with record_function(BEGIN):
            pass

    def _text(self, trace: profile, split: TimeSplit, steps: int) -> str:
        title = f"profile of steps {self._begin + 1} to {self._finished}, rank {self._rank}"
        where = [] if self._path is None else [f"trace: {self._path}"]
        return "\n".join([title, *_table(trace, steps), _line(split, steps), *where])


def _operations(trace: profile, steps: int) -> list[tuple[str, float, float, float]]:
    """The operations with the most self time, on the GPU if there is one, else on the CPU: names, milliseconds and
    calls per step, and shares of the time of all operations."""
    rows = [row for row in trace.key_averages() if _is_operation(row)]
    clock = "self_device_time_total" if any(row.self_device_time_total for row in rows) else "self_cpu_time_total"
    own_time = attrgetter(clock)
    whole = sum(map(own_time, rows)) or 1.0
    most = sorted(rows, key=own_time, reverse=True)[:_ROWS]
    return [(row.key, own_time(row) / 1e3 / steps, row.count / steps, own_time(row) / whole) for row in most]


def _values(trace: profile, split: TimeSplit, steps: int) -> dict[str, Any]:
    """In milliseconds per step."""
    parts = {"step": split.whole, "compute": split.compute, "exposed": split.exposed, "idle": split.idle}
    parts["communication"] = split.communication
    operations = [(name, round(each, 4), round(calls, 2)) for name, each, calls, _ in _operations(trace, steps)]
    return {**{name: round(time / 1e3 / steps, 4) for name, time in parts.items()}, "operations": operations}


def _table(trace: profile, steps: int) -> list[str]:
    lines = [f"{'operation':{_NAME_WIDTH}} {'ms/step':>9} {'%':>5} {'calls/step':>10}"]
    for name, milliseconds, calls, share in _operations(trace, steps):
        name = name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"
        lines.append(f"{name:{_NAME_WIDTH}} {milliseconds:9.3f} {share:5.0%} {calls:10.3g}")
    return lines


def _is_operation(row: Any) -> bool:
    """Kernels are listed under the operation that launched them; annotations are not operations."""
    if row.device_type != DeviceType.CPU or row.key.startswith(_RUNTIME):
        return False
    return not row.is_user_annotation or is_collective(row.key)


def _line(split: TimeSplit, steps: int) -> str:
    times = {"compute": split.compute, "exposed communication": split.exposed, "idle": split.idle}
    times["total communication"] = split.communication
    *parts, last = (f"{name} {t / 1e3 / steps:.2f} ms ({t / split.whole:.0%})" for name, t in times.items())
    return f"step: {split.whole / 1e3 / steps:.2f} ms; {', '.join(parts)}; {last}"


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Kineto logs the start and end of profiling to stderr unless this variable is set when it first starts."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]


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


def spans_of(events: Iterable[Any]) -> list[Span]:
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


def split_time(trace: list[Span]) -> TimeSplit:
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
    compute = _union(span for span in trace if span.on_device and not span.annotation and not span.collective)
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
