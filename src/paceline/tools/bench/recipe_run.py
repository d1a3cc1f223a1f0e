"""Measures the steps of a recipe on every rank of a launch: `python -m paceline.tools.bench.recipe_run REQUEST RESULT`.

A recipe runs as it is, without what happens between steps (evaluations, checkpoints) and without files. For a
prediction, the same ranks also run it without communication, all at the same time: they share cores and memory
bandwidth as before, so what is left is the computation that ranks slow down for one another. Last, they measure the
link between them with messages of the sizes that DDP sends.

REQUEST are the arguments of `measure` as JSON; RESULT is the file to which rank 0 writes what it returns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from paceline.config.recipe import Config
from paceline.monitor.rank_stats import process_memory
from paceline.parallel.dynamic_ddp import Build, DynamicDDP
from paceline.plan.network_model import LinkModel, bare
from paceline.run import regular_files
from paceline.runtime import collectives
from paceline.runtime.process_group import World
from paceline.tools.bench import collective_times
from paceline.tools.bench.step_times import TimedTrainer
from paceline.train import recipe_objects
from paceline.train.sliced_step import SlicedStep

_WARM_UP = 5  # steps that are not counted: the first ones allocate, and the second one counts FLOPs
_ROUNDS = 4
_LINK_SECONDS = 2.0  # for measuring the link
_SMALLEST = 1024  # bytes of a message there


def main(request: str, result: str) -> None:
    measured = measure(**json.loads(request))
    if collectives.is_main():
        regular_files.replace(Path(result), json.dumps(measured).encode())


def measure(recipe: Mapping[str, Any], steps: int, *, predicts: bool) -> dict[str, Any]:
    """The times of `steps` steps on every rank and, if `predicts`, what their prediction is made of. Collective: must
    be called on every rank. Plain values, equal on every rank."""
    config = bare(Config.from_dict(recipe))
    run = RecipeRun(config)
    run.warm_up()
    trainer = run.trainer
    world, engine = trainer.world, trainer._engine
    why = unpredictable(trainer)
    result: dict[str, Any] = {
        "ranks": world.size,
        "local_ranks": world.rank_info.local_world,
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type,
        "layout": str(engine.layout.degrees),
        "strategy": engine.layout.strategy,
        "separate": isinstance(engine.parts.forward, DynamicDDP)
        or isinstance(engine.stepper, SlicedStep)
        or engine.mesh.local_replicas > 1,
        "batch": run.batch,
        "memory": collectives.all_gather_object(process_memory(world.device)[1]),
        "unpredictable": why,
    }
    if not predicts or why:
        run.measure(steps)
        return {**result, "steps": collectives.all_gather_object(run.steps)}
    del trainer, engine
    compute = _measure_both(run, config, steps)
    buckets = collectives.broadcast_object(compute.buckets)
    return {
        **result,
        "steps": collectives.all_gather_object(run.steps),
        "compute": collectives.all_gather_object(compute.steps),
        "buckets": buckets,
        "link": asdict(_measure_link([size for _, size in buckets], world)),
    }


def unpredictable(trainer: TimedTrainer) -> str:
    """Why there is no prediction, which takes out the communication of a layout; empty if there is one."""
    engine = trainer._engine
    if trainer.world.size == 1:
        return "one rank"
    if not isinstance(engine.parts.forward, DynamicDDP):
        return f"{engine.layout.strategy} communicates inside forward and backward"
    return "sync changes what is sent" if trainer.config.sync is not None else ""


class RecipeRun:
    """A recipe in training, measured in one or more rounds."""

    def __init__(self, config: Config) -> None:
        trainer = TimedTrainer.from_config(config)
        assert isinstance(trainer, TimedTrainer)
        self.trainer, self._data = trainer, recipe_objects.build_data(config)[0]
        self.steps: list[dict[str, float]] = []
        self.buckets: list[tuple[float, int]] = []

    @property
    def batch(self) -> int:
        assert self.trainer._loaders.plan is not None
        return self.trainer._loaders.plan.size

    def warm_up(self, *, reduces: bool = True) -> None:
        """Take steps that are not counted. `reduces`: whether gradients are reduced from now on."""
        if not reduces:
            _omit_reduction(self.trainer)
        self.trainer.train(self._data, max_steps=_WARM_UP)

    def measure(self, steps: int) -> None:
        """Take `steps` further steps. The first one after a break is not counted, and the last one has no end."""
        self.trainer.train(self._data, max_steps=self.trainer.step_count + steps + 2)
        self.steps += self.trainer.times.steps()[1:]
        self.buckets = self.trainer.times.buckets(skip=1)

    def free(self) -> None:
        del self.trainer, self._data


def _measure_both(run: RecipeRun, config: Config, steps: int) -> RecipeRun:
    """Measure with and without communication, in turns, so that other work on the machine slows down both. A GPU, which
    has none, may not have the memory for two models: there one after the other. Returns the one without."""
    if run.trainer.world.device.type == "cuda":
        run.measure(steps)
        run.free()
        compute = RecipeRun(config)
        compute.warm_up(reduces=False)
        compute.measure(steps)
        return compute
    compute = RecipeRun(config)
    compute.warm_up(reduces=False)
    for _ in range(_ROUNDS):
        for each in (run, compute):
            each.measure(ceil(steps / _ROUNDS))
    return compute


def _measure_link(buckets: Sequence[int], world: World) -> LinkModel:
    sizes = sorted({max(_SMALLEST, part) for size in buckets for part in (size // 2, size, size * 2)})
    timings = collective_times.measure("all_reduce", sizes, world.device, _LINK_SECONDS).timings
    return LinkModel.fit("all_reduce", world.size, [(each.size, each.seconds) for each in timings])


def _omit_reduction(trainer: TimedTrainer) -> None:
    """Let DDP fill its buckets, and keep the gradients of this rank in them."""
    replicas = trainer._engine.parts.forward
    assert isinstance(replicas, DynamicDDP)
    trainer._engine.features.replicas = None  # their weights will differ
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


if __name__ == "__main__":
    main(*sys.argv[1:])
