"""The learning rate as a function of the step: no state, so a resumed run needs none.

    constant  stays
    linear    falls in a straight line to the horizon
    cosine    falls in half a cosine to the horizon
    wsd       stays, then falls in a straight line over the last part of the horizon (warm-up, stable, decay)
    step      is multiplied by `cut` at given steps
    plateau   stays; optim/plateau.py multiplies it by what the evaluations say

All of them begin with the warm-up and end at `floor`, a fraction of the highest rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from paceline.config.sections import ScheduleSection as Settings
from paceline.plan.derive import SchedulePlan


@dataclass(frozen=True)
class Schedule:
    """What the highest learning rate is multiplied by. Everything is counted in optimizer steps of the run."""

    name: str
    steps: int  # the horizon; only linear, cosine and wsd look at it
    warmup: int
    floor: float
    warmup_from: float = 0.0
    fall: int = 0  # wsd: where the fall begins
    every: int | None = None  # step: a cut after every so many steps …
    cuts: tuple[int, ...] = ()  # … or after these, in ascending order
    cut: float = 0.1

    def factor(self, step: int) -> float:
        """For the optimizer step that follows `step` finished ones."""
        if step < self.warmup:
            # The line begins one step earlier: a first step with a learning rate of zero would be wasted.
            return self.warmup_from + (1.0 - self.warmup_from) * (step + 1) / self.warmup
        if self.name == "linear":
            return self._above_floor(1.0 - self._done(step, self.warmup))
        if self.name == "cosine":
            return self._above_floor(0.5 * (1.0 + math.cos(math.pi * self._done(step, self.warmup))))
        if self.name == "wsd":
            return self._above_floor(1.0 - self._done(step, max(self.fall, self.warmup)))
        if self.name == "step":
            number = step // self.every if self.every else bisect_right(self.cuts, step)
            return max(self.floor, self.cut**number)
        return 1.0

    def _done(self, step: int, start: int) -> float:
        """How much of the way from `start` to the horizon lies behind, from 0 to 1."""
        return min(1.0, max(0, step - start) / max(1, self.steps - start))

    def _above_floor(self, height: float) -> float:
        return self.floor + (1.0 - self.floor) * height


def from_plan(settings: Settings, plan: SchedulePlan) -> Schedule:
    """The schedule of a recipe, once the length of the data is known."""
    return Schedule(
        name=settings.name,
        steps=int(plan.steps.value),
        warmup=int(plan.warmup.value),
        floor=settings.floor,
        warmup_from=settings.warmup_from,
        fall=int(plan.fall.value) if plan.fall else 0,
        every=int(plan.every.value) if plan.every else None,
        cuts=tuple(int(cut.value) for cut in plan.cuts),
        cut=settings.factor,
    )
