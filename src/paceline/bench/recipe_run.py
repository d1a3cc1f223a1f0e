"""Measures the steps of a recipe, on every rank of a launch: `python -m paceline.bench.recipe_run REQUEST RESULT`.

A recipe runs as it is, without what happens between steps (evaluations, checkpoints) and without files. For a
prediction, the same ranks then run it again without communication, all at the same time: they share cores and memory
bandwidth as before, so what is left is the computation that ranks slow down for one another. Last, they measure the
link between them with messages of the sizes that DDP sends.

REQUEST are the arguments of `measure` as JSON; RESULT is the file to which rank 0 writes what it returns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from paceline.bench import collective_times
from paceline.bench.step_times import TimedTrainer
from paceline.config.recipe import Config
from paceline.monitor.rank_stats import process_memory
from paceline.parallel.replicas import Build, Replicas
from paceline.plan.network_model import LinkModel
from paceline.plan.scaling_model import bare
from paceline.run import regular_files
from paceline.runtime import collectives
from paceline.train import factory

WARM_UP = 5  # steps that are not counted: the first ones allocate, and the second one counts FLOPs
_LINK_SECONDS = 2.0  # for measuring the link
_SMALLEST = 1024  # bytes of a message there


def main(request: str, result: str) -> None:
    measured = measure(**json.loads(request))
    if collectives.is_main():
        regular_files.replace(Path(result), json.dumps(measured).encode())


def measure(recipe: Mapping[str, Any], steps: int, *, predicts: bool) -> dict[str, Any]:
    """The times of `steps` steps on every rank and, if `predicts`, what their prediction is made of. Collective: must
    be called on every rank. Plain values, equal on every rank."""
    config = bare(Config.from_dict(recipe), WARM_UP + steps + 1)
    trainer = timed_trainer(config)
    _train(trainer)
    world, layout = trainer.world, trainer._engine.layout
    batch = trainer._loaders.plan
    assert batch is not None
    result: dict[str, Any] = {
        "ranks": world.size,
        "local_ranks": world.rank_info.local_world,
        "cores": len(os.sched_getaffinity(0)),
        "device": _device_name(world.device),
        "layout": str(layout.degrees),
        "strategy": layout.strategy,
        "batch": batch.size,
        "steps": collectives.all_gather_object(trainer.times.steps()[WARM_UP:]),
        "memory": collectives.all_gather_object(process_memory(world.device)[1]),
    }
    if predicts and world.size > 1:
        reason = unpredictable(trainer)
        result |= {"unpredictable": reason} if reason else _without_communication(config)
    return result


def unpredictable(trainer: TimedTrainer) -> str:
    """Why the communication of this layout can't be taken out; empty if it can."""
    engine = trainer._engine
    if not isinstance(engine.wrapped.forward, Replicas):
        return f"{engine.layout.strategy} communicates inside forward and backward"
    return "sync changes what is sent" if trainer.config.sync is not None else ""


def _without_communication(config: Config) -> dict[str, Any]:
    trainer = timed_trainer(config)
    measured = measure_compute(trainer)
    sizes = sorted({max(_SMALLEST, part) for _, size in measured["buckets"] for part in (size // 2, size, size * 2)})
    timings = collective_times.measure("all_reduce", sizes, trainer.world.device, _LINK_SECONDS).timings
    link = LinkModel.fit("all_reduce", trainer.world.size, [(each.size, each.seconds) for each in timings])
    return {**measured, "link": asdict(link)}


def measure_compute(trainer: TimedTrainer) -> dict[str, Any]:
    """The steps of all ranks without communication, and when DDP has its buckets ready. Collective."""
    _omit_reduction(trainer)
    _train(trainer)
    return {
        "compute": collectives.all_gather_object(trainer.times.steps()[WARM_UP:]),
        "buckets": collectives.broadcast_object(trainer.times.buckets(skip=WARM_UP)),
    }


def timed_trainer(config: Config) -> TimedTrainer:
    trainer = TimedTrainer.from_config(config)
    assert isinstance(trainer, TimedTrainer)
    return trainer


def _train(trainer: TimedTrainer) -> None:
    data, _ = factory.build_data(trainer.config)
    trainer.train(data)


def _omit_reduction(trainer: TimedTrainer) -> None:
    """Let DDP fill its buckets, and keep the gradients of this rank in them."""
    replicas = trainer._engine.wrapped.forward
    assert isinstance(replicas, Replicas)
    trainer._engine.replicas = None  # their weights will differ
    trainer.align = collectives.barrier  # ranks begin each step together, as with communication

    def keep(bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        trainer.times.bucket_ready(buffer.nbytes)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        future.set_result(buffer)
        return future

    def hooked(ddp: DistributedDataParallel) -> DistributedDataParallel:
        ddp.register_comm_hook(None, lambda state, bucket: keep(bucket))  # torch rejects annotations that are strings
        return ddp

    build: Build = replicas._build
    replicas._build = lambda *, again, bucket_mb: hooked(build(again=again, bucket_mb=bucket_mb))
    hooked(replicas._ddp)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


if __name__ == "__main__":
    main(*sys.argv[1:])
