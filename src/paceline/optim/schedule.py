"""The learning rate as a function of the step: no state, so a resumed run needs none."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """What the highest learning rate is multiplied by: up in `warmup` steps, then down to `floor` at `steps`."""

    name: str
    steps: int
    warmup: int
    floor: float

    def factor(self, step: int) -> float:
        """For the optimizer step that follows `step` finished ones."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.name == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        falling = 1.0 - done if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.floor + (1.0 - self.floor) * falling
