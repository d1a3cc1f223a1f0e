"""How fast training is: FLOP/s, MFU, and the share of the time that it waits for data. Written at log points.

Each rank adds its numbers to the reduction of the log point: its FLOPs, which are added up over ranks, and how long it
waited for data, in a place of its own, because the slowest rank determines the speed of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.train.model_flops import ModelFlops


@dataclass(frozen=True)
class Interval:
    """The time between two log points on one rank, in seconds."""

    seconds: float
    steps: int
    waited: float  # for data, on the host
    synchronized: float = 0.0  # of the time, for the device at the log point

    @property
    def data_wait(self) -> float:
        """The share of the time in which training waits for data.

        While the host waits, a GPU works on the steps in its queue. If data is late, the queue is empty before each
        step, and the time at the log point is what the device needs for a step beyond the host's part. Otherwise it is
        that of many steps, and the device has not waited."""
        if self.seconds <= 0.0:
            return 0.0
        busy = self.seconds - self.waited + (self.steps - 1) * self.synchronized
        return min(1.0, max(0.0, 1.0 - busy / self.seconds))


class Rates:
    """Combines the numbers of all ranks."""

    def __init__(self, flops: ModelFlops, mesh: Mesh) -> None:
        self._flops, self._mesh = flops, mesh
        self._rank, self._ranks = collectives.rank(), collectives.world()

    def begin(self) -> None:
        """Call before the first step of a loop."""
        self._flops.begin()

    def own(self, interval: Interval) -> list[float]:
        """This rank's numbers in a sum over all ranks."""
        waits = [0.0] * self._ranks
        waits[self._rank] = interval.data_wait
        known = self._flops.per_sample is not None
        return [self._flops.per_sample or 0.0, float(known), *waits]

    def combine(self, sums: Sequence[float], samples_per_second: float) -> dict[str, float]:
        """The values of a log point, from the sums over all ranks."""
        flops, known, *waits = sums
        values = {"data_wait": round(max(waits), 4)}
        if known == self._ranks:
            each = flops / self._mesh.data_ranks * samples_per_second / self._ranks
            values["tflops_per_device"] = float(f"{each / 1e12:.4g}")
            if self._flops.peak is not None:
                values["mfu"] = round(each / self._flops.peak, 4)
        return values
