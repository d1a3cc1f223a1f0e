"""How fast training is: FLOP/s, MFU, and the share of the time that it waits for data; and with `sync`, how much it
sends. Written at log points.

Each rank adds its numbers to the reduction of the log point: its FLOPs and the bytes that it sent, which are added up
over ranks; and how long it waited for data, in a place of its own, because the slowest rank determines the speed of
all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from paceline.plan.slow_input import InputSource, InputWatch, Interval, ReadTime
from paceline.plan.traffic import COLLECTIVES, Traffic
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.train.model_flops import ModelFlops


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

    def begin(self, source: InputSource | None, groups: int) -> None:
        """Call before the first step of a loop, with what its batches come from."""
        self._flops.begin()
        if self.traffic is not None:
            self.traffic.take()  # what was sent before the first step
        self._reading = None if source is None else (ReadTime(source, groups), InputWatch(source, self._cores))

    def own(self, interval: Interval) -> list[float]:
        """This rank's numbers in a sum over all ranks."""
        known, waits = self._flops.per_sample is not None, [0.0] * (2 * self._ranks)
        if self._reading is not None:
            waits[self._rank] = interval.data_wait
            waits[self._ranks + self._rank] = self._reading[0](interval)
        sent = [] if self.traffic is None else self.traffic.take()
        return [self._flops.per_sample or 0.0, float(known), *waits, *sent]

    def combine(self, sums: Sequence[float], samples_per_second: float, interval: Interval) -> dict[str, float]:
        """The values of a log point, from the sums over all ranks."""
        values = {}
        if self._reading is not None:
            waits = sums[2 : 2 + self._ranks]
            slowest = max(range(self._ranks), key=waits.__getitem__)
            values["data_wait"] = round(waits[slowest], 4)
            read = sums[2 + self._ranks + slowest]
            said = self._reading[1].add(interval.seconds, interval.steps, waits[slowest], read)
            if said is not None:
                self._warn(said)
        if sums[1] == self._ranks:
            each = sums[0] / self._mesh.data_ranks * samples_per_second / self._ranks
            values["tflops_per_device"] = float(f"{each / 1e12:.4g}")
            if self._flops.peak is not None:
                values["mfu"] = round(each / self._flops.peak, 4)
        return values

    def sent(self, sums: Sequence[float], steps: int) -> dict[str, float]:
        """MB (10⁶ bytes) that a rank sent in a step, on average, and by collective; from the sums over all ranks."""
        if self.traffic is None:
            return {}
        each = [number / self._ranks / steps / 1e6 for number in sums[2 + 2 * self._ranks :]]
        by_collective = {f"sent_mb/{name}": number for name, number in zip(COLLECTIVES, each, strict=True) if number}
        return {name: float(f"{number:.4g}") for name, number in {"sent_mb": sum(each), **by_collective}.items()}
