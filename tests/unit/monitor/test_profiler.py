from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.config.sections import ProfileSection
from paceline.monitor.profiler import BEGIN, END, Profiler, Span, split_time
from paceline.run.folder import RunFolder
from paceline.runtime import collectives
from paceline.testing import ranks


def products(size: int, times: int) -> None:
    matrix = torch.full((size, size), 1 / size)  # its own square
    for _ in range(times):
        matrix = matrix @ matrix


def test_time_outside_torch_is_idle(tmp_path: Path) -> None:
    profiler = Profiler(ProfileSection(steps=[2, 5]), RunFolder(tmp_path), rank=3)
    outside, text = 0.0, None
    for finished in range(8):
        assert text is None or finished > 4
        text = profiler.step(finished) or text
        if 1 <= finished < 4:
            begin = time.perf_counter()
            sum(number * number for number in range(400_000))
            outside += time.perf_counter() - begin
        products(300, 10)
    assert text is not None and profiler.split is not None
    assert profiler.close() is None
    split = profiler.split
    assert split.idle > 0.98 * 1e6 * outside
    assert split.idle < 1e6 * outside + 0.25 * split.whole
    assert split.communication == 0
    assert text.splitlines()[0] == "profile of steps 2 to 4, rank 3"
    assert text.splitlines()[2].startswith("aten::mm ")
    assert re.search(r"aten::mm .* 10$", text, re.MULTILINE)  # calls in a step
    assert f"idle {split.idle / 3e3:.2f} ms ({split.idle / split.whole:.0%})" in text
    trace = json.loads((tmp_path / "profile" / "rank-00003.json").read_text())
    assert sum(event["name"] == "aten::mm" for event in trace["traceEvents"]) == 30


@ranks(2)
def test_the_fast_rank_waits_in_communication_and_the_slow_one_computes() -> None:
    """The slow rank computes more: for the fast one, that is communication which nothing hides."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    profiler = Profiler(ProfileSection(steps=[3, 7]), None, collectives.rank())
    text = None
    for finished in range(7):
        text = profiler.step(finished) or text
        if collectives.rank() == 1:
            products(500, 12)
        optimizer.zero_grad()
        wrapped(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    split = profiler.split
    assert split is not None and text is not None
    # Between ranks: a busy machine keeps both from running now and then.
    (fast, waits), (slow, waits_less) = collectives.all_gather_object([split.compute, split.exposed])
    assert slow > 2 * fast and waits > waits_less, text
    assert split.communication >= split.exposed > 0
    assert "exposed communication" in text


@pytest.mark.parametrize(("resumed_at", "traced"), [(0, "1 to 2"), (1, "2 to 2"), (100, "101 to 102")])
def test_a_resumed_run_traces_at_once(resumed_at: int, traced: str) -> None:
    profiler = Profiler(ProfileSection(steps=[1, 3]), None, 0)
    texts = []
    for finished in range(resumed_at, resumed_at + 5):
        texts.append(profiler.step(finished))
        products(10, 1)
    assert [text.splitlines()[0] for text in texts if text] == [f"profile of steps {traced}, rank 0"]


def test_training_that_ends_early_profiles_the_steps_so_far(tmp_path: Path) -> None:
    profiler = Profiler(ProfileSection(steps=[1, 100]), RunFolder(tmp_path), 0)
    assert profiler.step(0) is None
    products(10, 3)
    assert profiler.step(1) is None
    text = profiler.close()
    assert text is not None
    assert text.startswith("profile of steps 1 to 1, rank 0")
    assert (tmp_path / "profile" / "rank-00000.json").exists()
    assert profiler.close() is None
    assert profiler.step(2) is None


def test_training_that_ends_before_its_first_traced_step_gives_nothing(tmp_path: Path) -> None:
    profiler = Profiler(ProfileSection(steps=[1, 100]), RunFolder(tmp_path), 0)
    assert profiler.close() is None
    assert profiler.step(0) is None
    assert profiler.close() is None
    assert list(tmp_path.iterdir()) == []


def test_tracing_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    profiler = Profiler(ProfileSection(steps=[1, 2]), None, 0)
    profiler.step(0)
    products(10, 1)
    assert profiler.step(1) is not None
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


WINDOW = [Span(BEGIN, 0, 0, annotation=True), Span(END, 100, 101, annotation=True)]


def parts(*spans: Span) -> tuple[float, float, float, float]:
    found = split_time([*WINDOW, *spans])
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
