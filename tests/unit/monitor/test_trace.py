from __future__ import annotations

import math

from paceline.monitor import trace as monitor_trace
from paceline.monitor.trace import Span

WINDOW = [Span(monitor_trace.BEGIN, 0, 0, annotation=True), Span(monitor_trace.END, 100, 101, annotation=True)]


def parts(*spans: Span) -> tuple[float, float, float, float]:
    found = monitor_trace.split([*WINDOW, *spans])
    assert math.isclose(found.whole, found.compute + found.exposed + found.idle)
    return found.compute, found.communication, found.exposed, found.idle


def test_on_cpu_operations_compute_collectives_communicate_and_the_rest_is_idle() -> None:
    spans = [
        Span("aten::linear", 10, 30), Span("aten::addmm", 12, 29), Span("gloo:all_reduce", 20, 50, thread=1),
        Span("aten::mm", 80, 120), Span("my whole step", 0, 100, annotation=True), Span("aten::cat", 60, 70, thread=2),
    ]  # fmt: skip
    assert parts(*spans) == (40, 30, 20, 40)


def test_starting_and_waiting_for_a_collective_is_not_compute() -> None:
    backward = Span("autograd::engine::evaluate_function: AddmmBackward0", 0, 60, backward=True)
    spans = [backward, Span("aten::mm", 0, 10), Span("c10d::allreduce_", 10, 12), Span("aten::mm", 30, 40),
             Span("gloo:all_reduce", 12, 50, thread=1)]  # fmt: skip
    # 10 to 12 starts it; 12 to 50 is under way, of which a product hides 10; 50 to 60 is the backward pass itself.
    assert parts(*spans) == (30, 40, 30, 40)


def test_on_a_gpu_only_time_on_the_device_counts() -> None:
    spans = [
        Span("aten::mm", 0, 90), Span("c10d::allreduce_", 5, 60), Span("gemm", 10, 30, on_device=True),
        Span("Memcpy HtoD", 30, 35, on_device=True), Span("ncclDevKernel_AllReduce_Sum_f32", 20, 50, on_device=True),
        Span("my step", 0, 100, on_device=True, annotation=True), Span("gloo:all_reduce", 60, 70, thread=4),
    ]  # fmt: skip
    assert parts(*spans) == (25, 40, 25, 50)
