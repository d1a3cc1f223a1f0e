"""`ddp: {bucket_mb: auto}`: choose the size of DDP's buckets by a short measurement.

A bucket is reduced while the backward still computes the gradients of the next one. Small buckets start early, but each
of them costs the latency of a collective; which size is best depends on the model, the network and the device. So after
the pre-flight, DDP is built with a few sizes, each runs the first micro-batch with weight zero a few times, in turns,
and the one whose slowest rank was fastest is used. Rank 0 decides. The choice is saved in checkpoints: a resumed run
adds gradients in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from paceline.data.loader import MicroBatch
from paceline.guard import preflight, snapshot
from paceline.parallel.replicas import Replicas
from paceline.runtime import collectives
from paceline.train.engine import Engine

SIZES = (1.0, 5.0, 25.0, 100.0)  # MB, as DDP counts them: 2²⁰ bytes
_DEFAULT = 25.0
_ROUNDS = 5
_SECONDS = 10.0  # no further round is begun after this time
_MARGIN = 1.02  # between sizes whose times differ by less, the one nearest to the default is used


def choose(engine: Engine, micro: MicroBatch) -> None:
    """Measure sizes and use one, if the recipe says `auto`. Call within `engine.draw`. Collective."""
    if engine.config.ddp.bucket_mb != "auto":
        return
    replicas = engine.wrapped.forward
    if not isinstance(replicas, Replicas):
        engine.log.info("ddp: bucket_mb: auto has no effect, because this layout does not use DDP")
        return
    sizes = candidates(list(engine.module.parameters()))
    if len(sizes) == 1:
        choice, reason = _DEFAULT, "all gradients fit in one bucket"
    else:
        seconds = _measure(engine, replicas, micro, sizes)
        choice = collectives.broadcast_object(select(seconds))
        reason = ", ".join(f"{size:g} MB {1000 * each:.1f} ms" for size, each in seconds.items())
    _use(engine, replicas, choice)
    engine.draw.begin(micro)
    with replicas.without_hook():
        preflight.warm_up(engine.model, replicas.trial, micro.batch, engine.draw, _user_code(engine))
    engine.draw.end()
    engine.log.info(f"ddp: bucket_mb: auto selected {choice:g} MB ({reason})")


def candidates(parameters: Sequence[Tensor]) -> list[float]:
    """The sizes that divide the gradients into different numbers of buckets."""
    trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
    sizes: dict[int, float] = {}
    for size in SIZES:
        buckets, _ = _compute_bucket_assignment_by_size(trained, [int(size * 2**20)])
        sizes.setdefault(len(buckets), size)
    return list(sizes.values())


def select(seconds: Mapping[float, float]) -> float:
    fast = [size for size, each in seconds.items() if each <= min(seconds.values()) * _MARGIN]
    return min(fast, key=lambda size: abs(log(size / _DEFAULT)))


def _measure(engine: Engine, replicas: Replicas, micro: MicroBatch, sizes: Sequence[float]) -> dict[float, float]:
    """Seconds of a forward and backward by size: the median of the slowest rank."""
    seconds: dict[float, list[float]] = {size: [] for size in sizes}
    began = perf_counter()
    engine.draw.begin(micro)
    with snapshot.preserved(engine.model, *_user_code(engine)), replicas.without_hook():
        for _ in range(_ROUNDS):
            for size in sizes:
                engine.module.zero_grad(set_to_none=True)  # views of the buckets of the last size
                replicas.resize(size)
                _seconds(engine, replicas, micro)  # after the first backward, DDP rebuilds its buckets
                seconds[size].append(_seconds(engine, replicas, micro))
            if not collectives.broadcast_object(perf_counter() - began < _SECONDS):
                break
    engine.draw.end()
    slowest = torch.tensor(list(seconds.values()), dtype=torch.float64, device=engine.world.device)
    collectives.all_reduce(slowest, op="max")
    return {size: median(times) for size, times in zip(sizes, slowest.tolist(), strict=True)}


def _seconds(engine: Engine, replicas: Replicas, micro: MicroBatch) -> float:
    batch, device = snapshot.copied(micro.batch), engine.world.device
    collectives.barrier()
    began = _now(device)
    with engine.draw.copy():
        value, _ = replicas.trial(batch)
        (value * 0.0).backward()
    return _now(device) - began


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def _use(engine: Engine, replicas: Replicas, size: float) -> None:
    replicas.resize(size)
    ddp = engine.config.ddp.model_copy(update={"bucket_mb": size})
    engine.config = engine.config.model_copy(update={"ddp": ddp})


def _user_code(engine: Engine) -> list[Any]:
    return [engine.task.criterion, engine.task.loss_fn]


class BucketSizeState:
    """The choice, in checkpoints of a run with `bucket_mb: auto`. A run that has measured keeps its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> float | None:
        size = self._engine.config.ddp.bucket_mb
        return size if isinstance(size, float) else None

    def load_state_dict(self, state: float | None) -> None:
        engine, replicas = self._engine, self._engine.wrapped.forward
        if state is not None and engine.config.ddp.bucket_mb == "auto" and isinstance(replicas, Replicas):
            _use(engine, replicas, state)
            engine.log.info(f"ddp: bucket_mb: auto uses {state:g} MB, as measured before this checkpoint")
