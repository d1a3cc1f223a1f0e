"""Learning rate schedules: pure functions of the step, so that only `Plateau` has state to save.

    constant  constant
    linear    linear decay until the horizon
    cosine    cosine decay until the horizon
    wsd       warm-up, stable, decay: constant, then linear decay over the last part of the horizon
    step      multiplied by `gamma` periodically or at milestones
    plateau   constant; `Plateau` reduces it when evaluations stop improving

All of them start with the warm-up and end at `floor`, a fraction of the base learning rate.

`Best` is the best value of a metric so far, also for best checkpoints and early stopping.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any

from paceline.config.components import SCHEDULES, smaller_is_better
from paceline.config.sections import ScheduleSection as Settings
from paceline.plan.schedule import SchedulePlan


class Best:
    """The best value of a metric.

    `mode` is "min" or "max"; None: as usual for a metric of that name. An improvement
    must exceed `min_delta` + `min_change` × |best|. NaN and infinity are never improvements.
    """

    def __init__(self, metric: str, mode: str | None = None, min_delta: float = 0.0, min_change: float = 0.0) -> None:
        smaller = smaller_is_better(metric) if mode is None else mode == "min"
        self.mode = "min" if smaller else "max"
        self.value: float | None = None
        self._min_delta, self._min_change = min_delta, min_change

    def improved(self, value: float) -> bool:
        """Whether this is the best value so far; if so, it is stored."""
        if not isfinite(value) or not self._beats(value):
            return False
        self.value = value
        return True

    def _beats(self, value: float) -> bool:
        if self.value is None:
            return True
        gain = self.value - value if self.mode == "min" else value - self.value
        return gain > self._min_delta + self._min_change * abs(self.value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


@dataclass(frozen=True)
class Schedule:
    """The factor of the base learning rate. Everything is counted in optimizer steps of the run."""

    name: str
    steps: int  # the horizon; 0 if the schedule does not need it
    warmup: int
    floor: float
    warmup_from: float = 0.0
    decay_start: int = 0  # wsd
    every: int | None = None  # step: the period of the decay …
    milestones: tuple[int, ...] = ()  # … or its steps, in ascending order
    gamma: float = 0.1  # step

    def factor(self, step: int) -> float:
        """The factor for the optimizer step after `step` finished ones."""
        if step < self.warmup:
            # step + 1, because a first step with a learning rate of zero would have no effect.
            return self.warmup_from + (1.0 - self.warmup_from) * (step + 1) / self.warmup
        return self._after_warmup(self, step)

    @cached_property
    def _after_warmup(self) -> Callable[..., float]:
        return SCHEDULES.find(self.name)

    def progress(self, step: int, start: int) -> float:
        """Progress from `start` (0) to the horizon (1)."""
        return min(1.0, max(0, step - start) / max(1, self.steps - start))

    def above_floor(self, factor: float) -> float:
        return self.floor + (1.0 - self.floor) * factor


@SCHEDULES.implement("constant")
def constant(schedule: Schedule, step: int) -> float:
    return 1.0


@SCHEDULES.implement("linear")
def linear(schedule: Schedule, step: int) -> float:
    return schedule.above_floor(1.0 - schedule.progress(step, schedule.warmup))


@SCHEDULES.implement("cosine")
def cosine(schedule: Schedule, step: int) -> float:
    return schedule.above_floor(0.5 * (1.0 + math.cos(math.pi * schedule.progress(step, schedule.warmup))))


@SCHEDULES.implement("wsd")
def wsd(schedule: Schedule, step: int) -> float:
    return schedule.above_floor(1.0 - schedule.progress(step, max(schedule.decay_start, schedule.warmup)))


@SCHEDULES.implement("step")
def step_decay(schedule: Schedule, step: int) -> float:
    number = step // schedule.every if schedule.every else bisect_right(schedule.milestones, step)
    return max(schedule.floor, schedule.gamma**number)


@SCHEDULES.implement("plateau")
def plateau(schedule: Schedule, step: int) -> float:
    return 1.0


def from_plan(settings: Settings, plan: SchedulePlan) -> Schedule:
    """The schedule of a recipe."""
    return Schedule(
        name=settings.name,
        steps=int(plan.steps.value),
        warmup=int(plan.warmup.value),
        floor=settings.floor,
        warmup_from=settings.warmup_from,
        decay_start=int(plan.decay_start.value) if plan.decay_start else 0,
        every=int(plan.every.value) if plan.every else None,
        milestones=tuple(int(step.value) for step in plan.milestones),
        gamma=settings.factor,
    )


class Plateau:
    """Multiply `scale` by `factor` after more than `patience` evaluations without improvement.

    Equivalent to torch's ReduceLROnPlateau with a relative threshold, except that the threshold is relative to the
    absolute value of the best result: torch accepts a worse negative value as an improvement. The learning rate of a
    step is the base learning rate × `Schedule.factor(step)` (the warm-up) × `scale`.
    """

    def __init__(
        self, factor: float, patience: int, threshold: float, mode: str | None, floor: float, metric: str = "loss"
    ) -> None:
        self._factor, self._patience, self._floor = factor, patience, floor
        self._best = Best(metric, mode, min_change=threshold)
        self._waited = 0
        self.scale = 1.0

    def observe(self, value: float) -> bool:
        """Record the result of an evaluation. Returns whether the learning rate was reduced."""
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
