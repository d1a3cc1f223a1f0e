"""Profile some steps: the most expensive operations, and the overlap of communication with compute.

    profiler = Profiler(config.profile, run, rank)
    profiler.step(0)                        # before the loop, so that step 1 can be profiled
    for …: text = profiler.step(finished)   # after each step; returns a report after the last profiled one
    text = profiler.close()                 # if training ended earlier

The trace in the run folder can be viewed with ui.perfetto.dev or chrome://tracing. Profiling slows down small steps, so
percentages are more reliable than milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.config.sections import ProfileSection
from paceline.monitor import trace as monitor_trace
from paceline.run import regular_files
from paceline.run.folder import RunFolder

_ROWS = 12
_NAME_WIDTH = 50
# CUDA runtime calls; the kernels that they launch are listed under the name of the operation.
_RUNTIME = ("cuda", "cuLaunch", "Activity Buffer Request", "INVALID")


class Profiler:
    def __init__(self, settings: ProfileSection, run: RunFolder | None, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._path = None if run is None else run.trace(rank)
        self._split_path = None if run is None else run.profile_split(rank)
        self._trace: profile | None = None
        self._begin = self._end = self._finished = 0
        self._done = False
        self.split: monitor_trace.TimeSplit | None = None  # of all profiled steps

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
        with record_function(monitor_trace.END):
            pass
        trace.stop()
        steps = self._finished - self._begin
        if not steps:
            return None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with regular_files.replacing(self._path) as partial:
                trace.export_chrome_trace(str(partial))
        self.split = monitor_trace.split(monitor_trace.spans(trace.events()))
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
        with record_function(monitor_trace.BEGIN):
            pass

    def _text(self, trace: profile, split: monitor_trace.TimeSplit, steps: int) -> str:
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


def _values(trace: profile, split: monitor_trace.TimeSplit, steps: int) -> dict[str, Any]:
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
    return not row.is_user_annotation or monitor_trace.is_collective(row.key)


def _line(split: monitor_trace.TimeSplit, steps: int) -> str:
    def part(name: str, time: float) -> str:
        return f"{name} {time / 1e3 / steps:.2f} ms ({time / split.whole:.0%})"

    return (
        f"step: {split.whole / 1e3 / steps:.2f} ms; {part('compute', split.compute)}, "
        f"{part('exposed communication', split.exposed)}, {part('idle', split.idle)}; "
        f"{part('total communication', split.communication)}"
    )


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
