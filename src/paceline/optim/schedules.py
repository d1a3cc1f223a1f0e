"""The learning rate as a function of the step: no state (but `Plateau`'s), so a resumed run needs none.

    constant  stays
    linear    falls in a straight line to the horizon
    cosine    falls in half a cosine to the horizon
    wsd       stays, then falls in a straight line over the last part of the horizon (warm-up, stable, decay)
    step      is multiplied by `cut` at given steps
    plateau   stays; `Plateau` multiplies it by what the evaluations say

All of them begin with the warm-up and end at `floor`, a fraction of the highest rate.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.config.components import SCHEDULES
from paceline.config.sections import ScheduleSection as Settings
from paceline.optim.best import Best
from paceline.plan.schedule import SchedulePlan


@dataclass(frozen=True)
class Schedule:
    """What the highest learning rate is multiplied by. Everything is counted in optimizer steps of the run."""

    name: str
    steps: int  # the horizon; 0 where the schedule does not need it
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
        return self._after_warmup(self, step)

    @cached_property
    def _after_warmup(self) -> Callable[..., float]:
        return SCHEDULES.find(self.name)

    def done(self, step: int, start: int) -> float:
        """How much of the way from `start` to the horizon lies behind, from 0 to 1."""
        return min(1.0, max(0, step - start) / max(1, self.steps - start))

    def above_floor(self, height: float) -> float:
        return self.floor + (1.0 - self.floor) * height


@SCHEDULES.implement("constant")
def constant(schedule: Schedule, step: int) -> float:
    return 1.0


@SCHEDULES.implement("linear")
def linear(schedule: Schedule, step: int) -> float:
    return schedule.above_floor(1.0 - schedule.done(step, schedule.warmup))


@SCHEDULES.implement("cosine")
def cosine(schedule: Schedule, step: int) -> float:
    return schedule.above_floor(0.5 * (1.0 + math.cos(math.pi * schedule.done(step, schedule.warmup))))


@SCHEDULES.implement("wsd")
def wsd(schedule: Schedule, step: int) -> float:
    return schedule.above_floor(1.0 - schedule.done(step, max(schedule.fall, schedule.warmup)))


@SCHEDULES.implement("step")
def step_decay(schedule: Schedule, step: int) -> float:
    number = step // schedule.every if schedule.every else bisect_right(schedule.cuts, step)
    return max(schedule.floor, schedule.cut**number)


@SCHEDULES.implement("plateau")
def plateau(schedule: Schedule, step: int) -> float:
    return 1.0


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


class Plateau:
    """Cuts the learning rate where evaluations no longer improve: after more than `patience` of them without an
    improvement, `scale` is multiplied by `factor`.

    It means what torch's ReduceLROnPlateau with a relative threshold means. One difference: the threshold is relative
    to the size of the best value, where torch takes a worse negative value for an improvement. The learning rate of a
    step is the highest one × `Schedule.factor(step)` (the warm-up) × `scale`.
    """

    def __init__(
        self, factor: float, patience: int, threshold: float, mode: str | None, floor: float, metric: str = "loss"
    ) -> None:
        self._factor, self._patience, self._floor = factor, patience, floor
        self._best = Best(metric, mode, min_change=threshold)
        self._waited = 0
        self.scale = 1.0

    def observe(self, value: float) -> bool:
        """Take in an evaluation's result; whether that cut the learning rate."""
        if self._best.improved(value):
            self._waited = 0
            return False
        self._waited += 1
        if self._waited <= self._patience:
            return False
        self._waited = 0
        before, self.scale = self.scale, max(self.scale * self._factor, self._floor)
        return self.scale < before

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "waited": self._waited, "best": self._best.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self._waited = state["scale"], state["waited"]
        self._best.load_state_dict(state["best"])
