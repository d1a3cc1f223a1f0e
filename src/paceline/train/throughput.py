"""How fast training is: FLOP/s, MFU, and the share of the time that it waits for data; and with `sync`, how much it
sends. Written at log points.

Each rank adds its numbers to the reduction of the log point, by name: its FLOPs and the bytes that it sent, which are
added up over ranks; and how long it waited for data, in a place of its own, because the slowest rank determines the
speed of all; and what it did by itself in its last steps, to find stragglers.

The FLOPs that a rank computes per sample are counted once per call of `train()`. An eager model is counted while it
runs its second micro-batch, for the price of some Python calls. The first one shows whether it is compiled:
torch.compile runs eagerly inside a dispatch mode, with other rounding and more memory, so a compiled model is counted
on fake tensors instead, uncompiled, which computes nothing. An eager model in a process that has compiled another one
may contain compiled functions, and is not counted. A model that cannot be counted has no figures: wrong ones would be
worse.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from weakref import proxy, ref

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from paceline.data.loader import MicroBatch
from paceline.models.loss_module import LossModule
from paceline.monitor import gpu_stats
from paceline.monitor.flops import FlopCount, count_on_fakes, peak_flops
from paceline.monitor.gpu_stats import GpuMonitor, GpuStats, Nvml
from paceline.monitor.stragglers import BusyTime, Stragglers
from paceline.plan.network_model import COUNTED, Traffic
from paceline.plan.slow_input import InputMonitor, InputSource, Interval, ReadTime
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.train.checks import snapshot
from paceline.train.hooks import Hooks, HookTable

_log = logging.getLogger(__name__)


class ModelFlops:
    """`per_sample`: of the samples of this data rank, the part that this rank computes; None: not known (yet)."""

    def __init__(
        self,
        module: LossModule,
        hooks: HookTable,
        mesh: Mesh,
        draw: NoiseContext,
        code: Sequence[Any],
        *,
        eager: bool,
        countable: bool,
    ) -> None:
        """`eager`: nothing is compiled; `countable`: all of it runs in the main thread."""
        self._module, self._mesh = module, mesh
        # The recorder of a custom loop, which has these figures, may outlive its Trainer.
        self._hooks, self._draw = proxy(hooks), ref(draw)
        self._code, self._compiles, self._countable = code, not eager, countable
        self.per_sample: float | None = None
        self.peak: float | None = None  # FLOP/s of this device

    def begin(self) -> None:
        """Count an eager model in the second of the following micro-batches: the first shows whether it is compiled."""
        self.per_sample = self.peak = None
        if self._countable and not _is_redundant(self._module, self._mesh):
            self._hooks.set(Hooks(name="flops", before_micro=self._watch_first))

    def _watch_first(self, micro: MicroBatch) -> None:
        before = _compiled_frames()

        def done(_: MicroBatch) -> None:
            self._hooks.set(Hooks(name="flops"))
            is_compiled = any(part._compiled_call_impl is not None for part in self._module.modules())
            self._compiles |= is_compiled or _compiled_frames() > before
            if not self._compiles:
                if not _compiled_frames():  # otherwise a function in it may have been compiled before
                    self._hooks.set(Hooks(name="flops", before_micro=self._count_second))
            elif self._module.can_repeat:
                self._hooks.set(Hooks(name="flops", on_losses=lambda _: self._count_on_fakes(micro)))

        self._hooks.set(Hooks(name="flops", after_backward=done))

    def _count_second(self, micro: MicroBatch) -> None:
        counting = ExitStack()
        count = counting.enter_context(FlopCount())

        def before_backward(micro: MicroBatch, value: Tensor) -> None:
            """End the count before a backward that would have other bits in it."""
            if count.changes_backward:
                counting.close()

        def done(micro: MicroBatch) -> None:
            counting.close()
            self._hooks.set(Hooks(name="flops"))
            self._take(count, micro.samples)

        self._hooks.set(Hooks(name="flops", before_backward=before_backward, after_backward=done))

    def _count_on_fakes(self, micro: MicroBatch) -> None:
        """In the first step, which compiles, because restoring a model waits for the GPU."""
        self._hooks.set(Hooks(name="flops"))
        draw = self._draw()
        assert draw is not None
        try:
            with snapshot.preserved(self._module, *self._code), draw.uninstalled():
                count = count_on_fakes(self._module, micro.batch)
            self._take(count, micro.samples)
        except Exception as error:  # a forward that depends on values
            _log.debug("FLOPs are not known: %r", error)

    def _take(self, count: FlopCount, samples: int) -> None:
        if count.uncounted:
            _log.debug("FLOPs are not known: no formula for %s", ", ".join(sorted(count.uncounted)))
        elif count.total and samples:
            self.per_sample = count.total / samples
            device = self._mesh.device
            if device.type == "cuda" and count.matmul_precision is not None:
                self.peak = peak_flops(torch.cuda.get_device_name(device), count.matmul_precision)


def _compiled_frames() -> int:
    """Frames that torch.compile has seen in this process."""
    return sum(counters["frames"].values())


def _is_redundant(module: LossModule, mesh: Mesh) -> bool:
    """Whether tensor-parallel ranks compute the same products, which do not add up to those of the model."""
    if mesh.degrees.tensor == 1:
        return False
    weights = [
        parameter
        for part in module.modules()
        if not isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
        if parameter.dim() > 1
    ]
    return not all(isinstance(weight, DTensor) and _is_sharded(weight, "tensor") for weight in weights)


def _is_sharded(weight: DTensor, axis: str) -> bool:
    names = weight.device_mesh.mesh_dim_names or (axis,)
    return any(place.is_shard() for name, place in zip(names, weight.placements, strict=True) if name == axis)


class Throughput:
    """Combines the numbers of all ranks."""

    def __init__(
        self,
        flops: ModelFlops,
        mesh: Mesh,
        warn: Callable[[str], None],
        local_ranks: int,
        traffic: Traffic | None = None,
        loss_scale: Callable[[], Tensor] | None = None,
    ) -> None:
        """`loss_scale`: of fp16."""
        self._flops, self._mesh, self._warn, self.traffic = flops, mesh, warn, traffic
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self._cores = cores // local_ranks
        self._rank, self._ranks = collectives.rank(), collectives.world()
        self._reading: tuple[ReadTime, InputMonitor] | None = None  # None: the user's loop reads the data
        self.own_time = BusyTime(mesh.device) if self._ranks > 1 else None
        self.stragglers: Stragglers | None = None
        self._loss_scale = loss_scale
        nvml = Nvml.open(mesh.device) if mesh.device.type == "cuda" else None
        self._gpu = None if nvml is None else GpuStats(nvml)
        self._gpus = GpuMonitor(self._ranks, warn) if mesh.device.type == "cuda" else None

    def begin(self, source: InputSource | None, groups: int) -> None:
        """Call before the first step of a loop, with what its batches come from."""
        self._flops.begin()
        if self.traffic is not None:
            self.traffic.take()  # what was sent before the first step
        self._reading = None if source is None else (ReadTime(source, groups), InputMonitor(source, self._cores))
        if self.own_time is not None and source is not None:
            self.own_time.resume()
            self.stragglers = Stragglers(self._ranks, self._mesh.degrees.pipeline, self._warn)
        if self._gpu is not None and source is not None:
            self._gpu.start()

    def own(self, interval: Interval) -> dict[str, list[float]]:
        """This rank's numbers in a sum over all ranks, by what they are about."""
        waits = [0.0, 0.0, 0.0]  # the share of time, the time that reading takes, and that of new workers
        if self._reading is not None:
            starting = self._reading[0].starting()
            waited = max(0.0, interval.waited - starting)
            rest = replace(interval, seconds=max(0.0, interval.seconds - starting), waited=waited)
            waits = [interval.data_wait, self._reading[0](rest), starting]
        flops = [self._flops.per_sample or 0.0, float(self._flops.per_sample is not None)]
        found = {"flops": flops, "waits": self._in_own_place(waits)}
        if self.own_time is not None:
            found["times"] = self._in_own_place(self.own_time.numbers())
        if self._gpus is not None:
            own = [0.0] * gpu_stats.NUMBERS if self._gpu is None else self._gpu.numbers()
            found["gpus"] = self._in_own_place(own)
        if self.traffic is not None:
            found["sent"] = self.traffic.take()
        return found

    def _in_own_place(self, numbers: list[float]) -> list[float]:
        before, after = self._rank, self._ranks - self._rank - 1
        return [*[0.0] * (before * len(numbers)), *numbers, *[0.0] * (after * len(numbers))]

    def combine(
        self, sums: Mapping[str, Sequence[float]], samples_per_second: float, interval: Interval, step: int
    ) -> dict[str, float]:
        """The values of the log point after `step`, from the sums over all ranks."""
        values = {}
        if self._reading is not None:
            waits = sums["waits"]
            slowest = max(range(0, len(waits), 3), key=waits.__getitem__)
            waited, read, starting = waits[slowest : slowest + 3]
            values["data_wait"] = round(waited, 4)
            said = self._reading[1].add(interval.seconds, interval.steps, waited, read, starting)
            if said is not None:
                self._warn(said)
        if self.stragglers is not None:
            self.stragglers.log_point(sums["times"], step, interval.steps, interval.seconds)
            values |= self.stragglers.values()
        if self._gpus is not None:
            self._gpus.log_point(sums["gpus"])
        if self._loss_scale is not None:
            values["loss_scale"] = float(self._loss_scale())
        flops, known = sums["flops"]
        if known == self._ranks:
            each = flops / self._mesh.data_ranks * samples_per_second / self._ranks
            values["tflops_per_device"] = float(f"{each / 1e12:.4g}")
            if self._flops.peak is not None:
                values["mfu"] = round(each / self._flops.peak, 4)
        return values

    def of_rank(self) -> dict[str, Any]:
        """For the statistics of this rank, at a log point."""
        gpu = {"gpu": self._gpu.last} if self._gpu is not None and self._gpu.last else {}
        if self.stragglers is None or self.own_time is None:
            return gpu
        slow = self.stragglers.current.get(self._rank)
        return gpu | {"own_time": round(self.own_time.middle, 6)} | ({"slowdown": round(slow.times, 2)} if slow else {})

    def finish(self) -> None:
        """Training has ended."""
        if self.stragglers is not None:
            self.stragglers.finish()
        if self._gpu is not None:
            self._gpu.stop()

    def sent(self, sums: Mapping[str, Sequence[float]], steps: int) -> dict[str, float]:
        """MB (10⁶ bytes) that a rank sent in a step, on average, and by collective; from the sums over all ranks."""
        if self.traffic is None:
            return {}
        each = [number / self._ranks / steps / 1e6 for number in sums["sent"]]
        by_collective = {f"sent_mb/{name}": number for name, number in zip(COUNTED, each, strict=True) if number}
        return {name: float(f"{number:.4g}") for name, number in {"sent_mb": sum(each), **by_collective}.items()}
