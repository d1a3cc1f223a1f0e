from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

import worlds
from paceline.errors import DataError
from paceline.runtime import process_group, processes
from paceline.runtime.processes import call_in_child


def test_a_function_runs_in_another_process() -> None:
    parent = os.getpid()
    assert call_in_child(lambda: [os.getpid() != parent, None, "a" * 100_000]) == [True, None, "a" * 100_000]


def test_errors_are_raised_here() -> None:
    def fail() -> None:
        raise DataError("empty", "No samples.")

    with pytest.raises(DataError, match=r"\[data\.empty\] No samples\."):
        call_in_child(fail)
    with pytest.raises(RuntimeError, match="division by zero"):
        call_in_child(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="the process was killed"):
        call_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL))


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def worker(until: threading.Event) -> Iterator[threading.Event]:
    """A thread with the name of gloo's workers that computes until the event, then sleeps; yields its completion."""
    done, leave = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        started.set()
        while not until.is_set():
            sum(range(1000))
        done.set()
        leave.wait()

    started = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    yield done
    until.set()
    leave.set()
    thread.join()


def test_it_waits_for_a_worker_that_is_busy() -> None:
    until = threading.Event()
    with worker(until) as done:
        threading.Timer(0.2, until.set).start()
        processes.wait_until_idle(timeout=60.0)
        assert done.is_set()


def test_it_gives_up_after_the_timeout() -> None:
    with worker(threading.Event()) as done:
        processes.wait_until_idle(timeout=0.1)
        assert not done.is_set()


def test_workers_of_torch_have_the_name_that_is_looked_for() -> None:
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        torch_dist.all_reduce(torch.ones(1))
        assert processes._workers()
        processes.wait_until_idle(timeout=600.0)  # which would be longer than a test may take
    finally:
        torch_dist.destroy_process_group()


def policies(*names: str) -> list[int]:
    return [os.sched_getscheduler(thread) for thread, _ in processes._threads(*names)]


def test_threads_of_gloo_do_not_preempt_those_that_compute() -> None:
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        torch_dist.all_reduce(torch.ones(1))
        processes.keep_gloo_from_preempting()
        assert set(policies("gloo_tcp_loop", "pt_gloo_runloop")) == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
    finally:
        torch_dist.destroy_process_group()


@worlds.ranks(2)
def test_the_loop_of_a_new_group_does_not_preempt_either() -> None:
    before = len(policies("gloo_tcp_loop"))
    group = process_group.new_cpu_group(60.0)
    torch_dist.barrier(group)
    assert policies("gloo_tcp_loop") == [os.SCHED_BATCH] * (before + 1)
