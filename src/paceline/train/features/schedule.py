"""The learning rate: set by the recipe's schedule, by a torch scheduler of the user, or constant.

A recipe's schedule is a function of the step. A torch scheduler, or an object with the same methods, steps once per
epoch, as in PyTorch's examples, or once per optimizer step (`scheduler_interval="step"`); ReduceLROnPlateau steps after
each evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.checkpoint.state import OptionalState, StateEntry
from paceline.config.recipe import Config
from paceline.errors import TrainError
from paceline.optim.schedules import Plateau, from_plan
from paceline.plan.layout import FROM_SETTINGS, Derived
from paceline.plan.schedule import SchedulePlan
from paceline.train.checks.unsupported import interval_problem
from paceline.train.features.context import FeatureContext
from paceline.train.held_params import BoundOptimizer
from paceline.train.hooks import Hooks, HookTable

JUMP, SMALL = 2.0, 0.01  # a change by this factor is a jump, unless both rates are below this share of the highest


def build(context: FeatureContext) -> Hooks | None:
    return context.schedule.hooks()


class LearningRate:
    """`plateau` and `scheduler` are None if not used. `apart`: replicas train apart."""

    def __init__(self, config: Config, bound: BoundOptimizer, scheduler: Any, table: HookTable, apart: bool) -> None:
        self._config, self._optimizer, self._table = config, bound.optimizer, table
        self._owns_optimizer = not bound.is_users
        self.scheduler, self._apart = scheduler, apart
        self._factor: Callable[[int], float] | None = None  # for each step; None: constant
        self.steps_scheduler = False  # with the optimizer
        self._set: float | None = None  # the rate of the first group that the schedule set last
        self._warned = False
        settings = config.schedule
        self.plateau: Plateau | None = None
        if settings.name == "plateau":
            self.plateau = Plateau(
                settings.factor, settings.patience, settings.threshold, settings.mode, settings.floor, settings.metric
            )
        self._state = (
            StateEntry("plateau", OptionalState(self.plateau)),
            StateEntry("scheduler", SchedulerState(scheduler)),
        )
        if scheduler is not None:
            self._require_fitting(scheduler)

    def _require_fitting(self, scheduler: Any) -> None:
        settings = self._config.schedule
        if settings.name != "constant" or settings.warmup:
            raise TrainError(
                "two-schedules",
                f"Both a scheduler ({type(scheduler).__name__}) and a schedule ({settings.name}) are set.",
            )
        if getattr(scheduler, "optimizer", self._optimizer) is not self._optimizer:
            raise TrainError(
                "other-optimizer", f"The scheduler ({type(scheduler).__name__}) belongs to another optimizer."
            )

    def begin(
        self, plan: SchedulePlan, step: int, epochs: int | None, warn: Callable[[str], None]
    ) -> dict[str, Derived]:
        """Prepare a `train()` call after `step`, and return the rows to print. `epochs`: after which the run ends."""
        optimizer, settings = self._optimizer, self._config.schedule
        own = self._config.optimizer
        reason = FROM_SETTINGS if "name" in own.model_fields_set else "default"
        reason += "" if own.model_fields_set else ": no optimizer was passed"
        rows = {"optimizer": Derived(own.name, reason), **plan.rows()}
        if not self._owns_optimizer:
            rows["optimizer"] = Derived(type(optimizer).__name__, "passed to the Trainer")
            group = optimizer.param_groups[0]  # a scheduler that warms up has set the lr of the first step
            rows["learning rate"] = Derived(float(group.get("initial_lr", group["lr"])), "from the optimizer")
        if self.scheduler is not None:
            rows["scheduler"] = Derived(type(self.scheduler).__name__, f"steps {self.interval}")
            self.steps_scheduler = self.interval == "once per optimizer step"
            self._table.set(self.hooks())
            self._warn_of_interval(epochs, int(plan.steps.value) or None, warn)
            return rows
        last = {key: float(optimizer.param_groups[0].get(key, 0.0)) for key in ("lr", "initial_lr")}
        for group in optimizer.param_groups:
            if self._owns_optimizer:
                group["initial_lr"] = float(plan.lr.value)
            group.setdefault("initial_lr", group["lr"])
        if self._owns_optimizer or settings.name != "constant" or settings.warmup:
            self._follow(plan)
        if step and last["initial_lr"] == optimizer.param_groups[0]["initial_lr"]:  # it is not changed on purpose
            self._warn_of_jump(last["initial_lr"], last["lr"], step, int(plan.steps.value), warn)
        return rows

    def _warn_of_jump(self, peak: float, last: float, step: int, steps: int, warn: Callable[[str], None]) -> None:
        """Compare the rate of the last step with that of this schedule, which may be stretched by another horizon."""
        factor = self._factor
        if factor is None or self.plateau is not None:
            return
        low, high = sorted((last, peak * factor(step - 1)))
        if high > JUMP * low and high > SMALL * peak:
            error = TrainError(
                "lr-jumps",
                f"The learning rate jumps from {last:.3g} in step {step} to {peak * factor(step):.3g} in the next one.",
                why=f"the steps before followed another schedule than {self._config.schedule.name} over {steps} steps",
            )
            warn(str(error))

    def _warn_of_interval(self, epochs: int | None, steps: int | None, warn: Callable[[str], None]) -> None:
        if not isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            problem = interval_problem(self.scheduler, self._config.scheduler_interval, epochs, steps)
            if problem:
                warn(f"the scheduler ({type(self.scheduler).__name__}) steps {self.interval}, but {problem}")

    def _follow(self, plan: SchedulePlan) -> None:
        schedule = from_plan(self._config.schedule, plan)
        plateau = self.plateau
        if schedule.name == "constant" and schedule.warmup == 0:
            for group in self._optimizer.param_groups:
                group["lr"] = group["initial_lr"]
            self._factor = None
        elif plateau is None:
            self._factor = schedule.factor
        else:
            self._factor = lambda step: schedule.factor(step) * plateau.scale
        self._table.set(self.hooks())

    @property
    def interval(self) -> str:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            return "after each evaluation"
        return "once per epoch" if self._config.scheduler_interval == "epoch" else "once per optimizer step"

    @property
    def changes(self) -> bool:
        """Whether rates may differ between the steps of a `train()` call."""
        return self._factor is not None or self.steps_scheduler

    def hooks(self) -> Hooks:
        return Hooks(
            name="schedule",
            before_update=None if self._factor is None else self._set_rates,
            end_of_update=self._step_scheduler if self.steps_scheduler else None,
            reset=self._reset,
            state=self._state,
        )

    def _set_rates(self, step: int) -> None:
        assert self._factor is not None
        groups, factor = self._optimizer.param_groups, self._factor(step)
        for group in groups:
            group["lr"] = group["initial_lr"] * factor
        self._set = groups[0]["lr"]

    def _step_scheduler(self, step: int, stepped: bool) -> None:
        if stepped or self._apart:  # all replicas have the same learning rate
            self.scheduler.step()

    def _reset(self) -> None:
        self._set = None

    def warn_if_set(self, warn: Callable[[str], None]) -> None:
        """Warn once if the learning rate was set by others, which has no effect."""
        rate = self._optimizer.param_groups[0]["lr"]
        if self._factor is not None and self._set and rate != self._set and not self._warned:
            self._warned = True
            warn(
                f"the learning rate was set to {rate:g} during training, but the schedule "
                f"({self._config.schedule.name}) sets it before every step: remove the schedule to set it yourself"
            )

    def from_scheduler(self) -> None:
        """Set the optimizer's learning rates to those of the scheduler, if there is one."""
        if hasattr(self.scheduler, "get_last_lr"):
            for group, rate in zip(self._optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def epoch_ended(self) -> None:
        if self.scheduler is not None and self.interval == "once per epoch":
            self.scheduler.step()

    def evaluated(self, values: dict[str, Any]) -> None:
        if self.plateau is not None:
            self.plateau.observe(values[self._config.schedule.metric])
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(values[self._config.schedule.metric])


class SchedulerState:
    """The state of the LR scheduler, without functions (LambdaLR), which the user passes again."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> Any:
        return None if self._scheduler is None else _without_functions(self._scheduler.state_dict())

    def load_state_dict(self, state: Any) -> None:
        scheduler = self._scheduler
        if scheduler is not None and state:
            own = scheduler.state_dict()
            known = {key: value for key, value in state.items() if key in own}  # it may be of another class
            scheduler.load_state_dict({**own, **_with_counters(known, own)})


def _without_functions(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_functions(inner) for key, inner in value.items() if not callable(inner)}
    if isinstance(value, (list, tuple)):
        return [_without_functions(inner) for inner in value if not callable(inner)]
    return value


def _with_counters(saved: Any, own: Any) -> Any:
    """MultiStepLR requires a Counter, also inside a SequentialLR."""
    if isinstance(own, Counter):
        return Counter(saved)
    if isinstance(saved, dict) and isinstance(own, dict):
        return {key: _with_counters(value, own.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [_with_counters(*pair) for pair in zip(saved, own, strict=True)]
    return saved
