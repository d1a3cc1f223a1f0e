"""What it costs that gloo's threads preempt those that compute: all_reduce between small matrix products, on 2 and 4
ranks, with torch's scheduling of the threads and with paceline's, in turns.

python benchmarks/gloo_threads.py [--rounds 15] [--busy 0]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.runtime.processes import keep_gloo_from_preempting

CALLS = 200


def run_rank(rank: int, ranks: int, folder: str, batch: bool, times: Any) -> None:
    store = torch_dist.FileStore(f"{folder}/store", ranks)
    torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    value, matrix = torch.ones(4), torch.randn(400, 400)
    for _ in range(20):
        torch_dist.all_reduce(value)
    if batch:
        keep_gloo_from_preempting()
    torch_dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        torch_dist.all_reduce(value)
        for _ in range(5):
            (matrix * 2).sum()
    if rank == 0:
        times.put((time.perf_counter() - wall, time.process_time() - cpu))
    torch_dist.destroy_process_group()


def measure(ranks: int, batch: bool) -> tuple[float, float]:
    context = multiprocessing.get_context("fork")
    times = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, folder, batch, times)
        processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        found: tuple[float, float] = times.get()
        for process in processes:
            process.join()
    return found


def spin() -> None:
    while True:
        sum(range(100_000))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the ranks")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    busy = [multiprocessing.get_context("fork").Process(target=spin, daemon=True) for _ in range(options.busy)]
    for process in busy:
        process.start()
    found: dict[tuple[int, bool], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for ranks in (2, 4):
            for batch in (False, True):
                found[ranks, batch].append(measure(ranks, batch))
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {options.busy} busy processes, {options.rounds} rounds; ms a call, and CPU ms of a rank")
    for (ranks, batch), values in found.items():
        wall, cpu = (1000 / CALLS * statistics.median(column) for column in zip(*values, strict=True))
        print(f"{ranks} ranks  {'paceline' if batch else 'torch':8}  {wall:6.3f}  {cpu:6.3f}")
    for process in busy:
        process.terminate()


if __name__ == "__main__":
    main()
