from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from paceline.runtime import gloo_threads

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
        gloo_threads.wait_until_idle(timeout=60.0)
        assert done.is_set()


def test_it_gives_up_after_the_timeout() -> None:
    with worker(threading.Event()) as done:
        gloo_threads.wait_until_idle(timeout=0.1)
        assert not done.is_set()


def test_workers_of_torch_have_the_name_that_is_looked_for() -> None:
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        torch_dist.all_reduce(torch.ones(1))
        assert gloo_threads._workers()
        gloo_threads.wait_until_idle(timeout=600.0)  # which would be longer than a test may take
    finally:
        torch_dist.destroy_process_group()
