"""Who sets the learning rate: the recipe's schedule, a torch scheduler of the user's, or nobody.

A schedule of ours is a function of the step. A scheduler of the user's steps once an epoch, as in torch's own examples,
or once an optimizer step (`scheduler_interval="step"`); never once a process; one that looks at a metric steps after
each evaluation.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.config.recipe import Config
from paceline.errors import TrainError
from paceline.optim.schedules import Plateau, from_plan
from paceline.plan.derived import Derived
from paceline.plan.schedule import SchedulePlan
from paceline.train.optimizer_step import Updater


class LearningRate:
    """`plateau` and `scheduler` are None where the run has none."""

    def __init__(self, config: Config, updater: Updater, scheduler: Any, *, own_optimizer: bool) -> None:
        self._config, self._updater, self._own_optimizer = config, updater, own_optimizer
        self.scheduler = scheduler
        settings = config.schedule
        self.plateau: Plateau | None = None
        if settings.name == "plateau":
            self.plateau = Plateau(
                settings.factor,
                settings.patience,
                settings.threshold,
                settings.mode,
                settings.floor,
                settings.metric,
            )
        if scheduler is not None:
            self._require_fitting(scheduler)

    def _require_fitting(self, scheduler: Any) -> None:
        settings = self._config.schedule
        if settings.name != "constant" or settings.warmup:
            raise TrainError(
                "two-schedules",
                f"There is a scheduler ({type(scheduler).__name__}) and a schedule ({settings.name}).",
                fix="keep one of them",
            )
        if getattr(scheduler, "optimizer", None) is not self._updater.optimizer:
            raise TrainError(
                "other-optimizer",
                f"The scheduler ({type(scheduler).__name__}) sets the learning rate of another optimizer.",
                why="this one's would stay as it is",
                fix="build the scheduler from the optimizer that you give to the Trainer",
            )

    def begin(self, plan: SchedulePlan) -> dict[str, Derived]:
        """Set up for a call of `train()`; the rows that tell about it."""
        optimizer, settings = self._updater.optimizer, self._config.schedule
        rows = plan.rows()
        if not self._own_optimizer:
            rows["learning rate"] = Derived(float(optimizer.param_groups[0]["lr"]), "the optimizer's own")
        if self.scheduler is not None:
            rows["scheduler"] = Derived(type(self.scheduler).__name__, f"yours: steps {self.interval}")
            self._updater.scheduler = self.scheduler if self.interval == "once an optimizer step" else None
            return rows
        for group in optimizer.param_groups:
            if self._own_optimizer:
                group["initial_lr"] = float(plan.lr.value)
            group.setdefault("initial_lr", group["lr"])
        if self._own_optimizer or settings.name != "constant" or settings.warmup:
            self._follow(plan)
        return rows

    def _follow(self, plan: SchedulePlan) -> None:
        schedule = from_plan(self._config.schedule, plan)
        plateau = self.plateau
        if schedule.name == "constant" and schedule.warmup == 0:
            for group in self._updater.optimizer.param_groups:
                group["lr"] = group["initial_lr"]
            self._updater.learning_rate = None
        elif plateau is None:
            self._updater.learning_rate = schedule.factor
        else:
            self._updater.learning_rate = lambda step: schedule.factor(step) * plateau.scale

    @property
    def interval(self) -> str:
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            return "after each evaluation"
        return "once an epoch" if self._config.scheduler_interval == "epoch" else "once an optimizer step"

    def from_scheduler(self) -> None:
        """Give the optimizer the rates that the user's scheduler has, if there is one."""
        if self.scheduler is not None:
            for group, rate in zip(self._updater.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def epoch_ended(self) -> None:
        if self.scheduler is not None and self.interval == "once an epoch":
            self.scheduler.step()

    def evaluated(self, values: dict[str, Any]) -> None:
        if self.plateau is not None:
            self.plateau.observe(values[self._config.schedule.metric])
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(values[self._config.schedule.metric])
