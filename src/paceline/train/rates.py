"""How fast training is: FLOP/s, MFU, and the share of the time that it waits for data; and with `sync`, how much it
sends. Written at log points.

Each rank adds its numbers to the reduction of the log point: its FLOPs and the bytes that it sent, which are added up
over ranks; and how long it waited for data, in a place of its own, because the slowest rank determines the speed of
all; and what it did by itself in its last steps, to find stragglers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.monitor import gpu_stats
from paceline.monitor.gpu_stats import GpuStats, GpuWatch, Nvml
from paceline.monitor.stragglers import NUMBERS, OwnTime, Stragglers
from paceline.plan.network_model import COUNTED, Traffic
from paceline.plan.slow_input import InputSource, InputWatch, Interval, ReadTime
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.train.model_flops import ModelFlops

_WAITS = 3  # numbers about waiting: the share of time, the time that reading takes, and that of new workers


class Rates:
    """Combines the numbers of all ranks."""

    def __init__(
        self,
        flops: ModelFlops,
        mesh: Mesh,
        warn: Callable[[str], None],
        local_ranks: int,
        traffic: Traffic | None = None,
    ) -> None:
        self._flops, self._mesh, self._warn, self.traffic = flops, mesh, warn, traffic
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        self._cores = cores // local_ranks
        self._rank, self._ranks = collectives.rank(), collectives.world()
        self._reading: tuple[ReadTime, InputWatch] | None = None  # None: the user's loop reads the data
        self.own_time = OwnTime(mesh.device) if self._ranks > 1 else None
        self.stragglers: Stragglers | None = None
        self.loss_scale: Callable[[], Tensor] | None = None  # of fp16
        nvml = Nvml.open(mesh.device) if mesh.device.type == "cuda" else None
        self._gpu = None if nvml is None else GpuStats(nvml)
        self._gpus = GpuWatch(self._ranks, warn) if mesh.device.type == "cuda" else None

    def begin(self, source: InputSource | None, groups: int) -> None:
        """Call before the first step of a loop, with what its batches come from."""
        self._flops.begin()
        if self.traffic is not None:
            self.traffic.take()  # what was sent before the first step
        self._reading = None if source is None else (ReadTime(source, groups), InputWatch(source, self._cores))
        if self.own_time is not None and source is not None:
            self.own_time.resume()
            self.stragglers = Stragglers(self._ranks, self._mesh.degrees.pipeline, self._warn)
        if self._gpu is not None and source is not None:
            self._gpu.start()

    def own(self, interval: Interval) -> list[float]:
        """This rank's numbers in a sum over all ranks."""
        known, waits = self._flops.per_sample is not None, [0.0] * (_WAITS * self._ranks)
        if self._reading is not None:
            starting = self._reading[0].starting()
            waited = max(0.0, interval.waited - starting)
            rest = replace(interval, seconds=max(0.0, interval.seconds - starting), waited=waited)
            waits[self._rank :: self._ranks] = [interval.data_wait, self._reading[0](rest), starting]
        times = [0.0] * NUMBERS if self.own_time is None else self.own_time.numbers()
        gpu = [0.0] * gpu_stats.NUMBERS if self._gpu is None else self._gpu.numbers()
        gpus = [] if self._gpus is None else self._in_own_place(gpu)
        sent = [] if self.traffic is None else self.traffic.take()
        return [self._flops.per_sample or 0.0, float(known), *waits, *self._in_own_place(times), *gpus, *sent]

    def _in_own_place(self, numbers: list[float]) -> list[float]:
        before, after = self._rank, self._ranks - self._rank - 1
        return [*[0.0] * (before * len(numbers)), *numbers, *[0.0] * (after * len(numbers))]

    def combine(
        self, sums: Sequence[float], samples_per_second: float, interval: Interval, step: int
    ) -> dict[str, float]:
        """The values of the log point after `step`, from the sums over all ranks."""
        values = {}
        if self._reading is not None:
            waits = sums[2 : 2 + self._ranks]
            slowest = max(range(self._ranks), key=waits.__getitem__)
            values["data_wait"] = round(waits[slowest], 4)
            read, starting = (sums[2 + number * self._ranks + slowest] for number in (1, 2))
            said = self._reading[1].add(interval.seconds, interval.steps, waits[slowest], read, starting)
            if said is not None:
                self._warn(said)
        if self.stragglers is not None:
            times = sums[2 + _WAITS * self._ranks : 2 + (_WAITS + NUMBERS) * self._ranks]
            self.stragglers.log_point(times, step, interval.steps, interval.seconds)
            values |= self.stragglers.values()
        if self._gpus is not None:
            first = 2 + (_WAITS + NUMBERS) * self._ranks
            self._gpus.log_point(sums[first : first + gpu_stats.NUMBERS * self._ranks])
        if self.loss_scale is not None:
            values["loss_scale"] = float(self.loss_scale())
        if sums[1] == self._ranks:
            each = sums[0] / self._mesh.data_ranks * samples_per_second / self._ranks
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

    def sent(self, sums: Sequence[float], steps: int) -> dict[str, float]:
        """MB (10⁶ bytes) that a rank sent in a step, on average, and by collective; from the sums over all ranks."""
        if self.traffic is None:
            return {}
        each = [number / self._ranks / steps / 1e6 for number in sums[-len(COUNTED) :]]
        by_collective = {f"sent_mb/{name}": number for name, number in zip(COUNTED, each, strict=True) if number}
        return {name: float(f"{number:.4g}") for name, number in {"sent_mb": sum(each), **by_collective}.items()}
