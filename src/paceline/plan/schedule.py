"""The learning rate schedule of a run in optimizer steps: base learning rate, warm-up, milestones and horizon.

Separate from `plan/batch.py` because it also needs the length of the data, which is known later.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from paceline.config.components import SCHEDULES
from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.layout import Derived
from paceline.text import plural


@dataclass(frozen=True)
class SchedulePlan:
    """The learning rate schedule; everything is counted in optimizer steps."""

    lr: Derived
    steps: Derived  # the horizon; 0 if it is neither known nor needed
    warmup: Derived
    decay_start: Derived | None = None  # wsd
    every: Derived | None = None  # step: the period of the decay …
    milestones: tuple[Derived, ...] = ()  # … or its steps, in ascending order

    def rows(self) -> dict[str, Derived]:
        """Only what applies to this run: no warm-up of zero steps, no unknown horizon."""
        rows = {"learning rate": self.lr, "horizon": self.steps, "warm-up": self.warmup}
        rows = {name: row for name, row in rows.items() if row.value}
        if self.decay_start is not None:
            rows["falls from"] = self.decay_start
        if self.every is not None:
            rows["cut every"] = self.every
        if self.milestones:
            steps = ", ".join(str(milestone.value) for milestone in self.milestones)
            rows["cuts at"] = Derived(steps, self.milestones[0].reason)
        return rows


def derive_schedule(
    config: Config,
    batch: int,
    steps_per_epoch: int | None,
    epochs: int | None,
    max_steps: int | None,
    *,
    in_epochs: int | None = None,
    endless: bool = False,
) -> SchedulePlan:
    """Convert a recipe's schedule to optimizer steps.

    `steps_per_epoch` is None if it changes with the epoch; `in_epochs` is then their sum. A custom training loop is
    `endless`: it needs a horizon only if the schedule does.
    """
    if epochs is not None and steps_per_epoch is None and in_epochs is not None and config.schedule.steps is None:
        steps = Derived(in_epochs, f"{plural(epochs, 'epoch')} of changing length")
    else:
        steps = _horizon(config, steps_per_epoch, epochs, max_steps, endless)
    every, milestones = _milestones(config, steps_per_epoch)
    return SchedulePlan(
        lr=learning_rate(config, batch),
        steps=steps,
        warmup=_warmup(config, int(steps.value), steps_per_epoch),
        decay_start=_decay_start(config, int(steps.value)),
        every=every,
        milestones=milestones,
    )


def pause_step(pause_at: int | float | None, total: int | None) -> int | None:
    """The step of `train.pause_at`; None if training ends before. A fraction is at least one step."""
    if pause_at is None or (total is not None and 1 <= pause_at >= total):
        return None
    if pause_at >= 1:
        return int(pause_at)
    if total is None:
        raise ConfigError(
            "no-horizon",
            f"train.pause_at is a fraction ({pause_at:g}) of all steps, but the data has no length.",
            fix="set it in steps, or set max_steps",
        )
    return max(1, round(pause_at * total))


def _horizon(
    config: Config, steps_per_epoch: int | None, epochs: int | None, max_steps: int | None, endless: bool
) -> Derived:
    if config.schedule.steps is not None:
        return _in_steps(config, "steps", config.schedule.steps, steps_per_epoch)
    if epochs is not None and steps_per_epoch is not None:
        return Derived(epochs * steps_per_epoch, f"{plural(epochs, 'epoch')} × {plural(steps_per_epoch, 'step')}")
    if max_steps is not None:
        return Derived(max_steps, "max_steps")
    if epochs is None and not endless:
        raise ConfigError("no-end", "The length of training is not set.")
    if SCHEDULES.facts(config.schedule.name).needs_horizon or 0 < config.schedule.warmup < 1:
        raise ConfigError(
            "no-horizon",
            f"The schedule {config.schedule.name!r} needs the number of steps, but the data has no length.",
            fix="set schedule.steps or max_steps",
        )
    return Derived(0, "unknown")


def _in_steps(config: Config, key: str, number: int, steps_per_epoch: int | None) -> Derived:
    """A setting of the schedule, converted from the unit of the recipe."""
    if config.schedule.unit == "steps":
        return Derived(number, f"schedule.{key}")
    if steps_per_epoch is None:
        raise ConfigError(
            "no-horizon",
            f"schedule.{key} is given in epochs, but the data has no fixed length.",
            why="the number of steps per epoch is unknown, or changes with the epoch",
            fix='set schedule.unit to "steps"',
        )
    arithmetic = f"{plural(number, 'epoch')} × {plural(steps_per_epoch, 'step')}"
    return Derived(number * steps_per_epoch, f"schedule.{key}: {arithmetic}")


def _decay_start(config: Config, steps: int) -> Derived | None:
    if config.schedule.name != "wsd":
        return None
    part = config.schedule.decay
    return Derived(steps - max(1, round(part * steps)), f"decay over the last {part:g} of {steps} steps")


def _milestones(config: Config, steps_per_epoch: int | None) -> tuple[Derived | None, tuple[Derived, ...]]:
    """The period or the milestones of the `step` schedule."""
    schedule = config.schedule
    if schedule.name != "step":
        return None, ()
    if schedule.every is None and not schedule.at:
        raise ConfigError("no-cuts", "The schedule 'step' needs a period or milestones.")
    if schedule.every is not None and schedule.at:
        raise ConfigError(
            "contradiction",
            f"schedule.every ({schedule.every}) and schedule.at ({schedule.at}) are both set.",
            fix="set only one of them",
        )
    if schedule.every is not None:
        return _in_steps(config, "every", schedule.every, steps_per_epoch), ()
    return None, tuple(_in_steps(config, "at", number, steps_per_epoch) for number in sorted(schedule.at))


def learning_rate(config: Config, batch: int) -> Derived:
    optimizer = config.optimizer
    if optimizer.lr_rule == "none":
        return Derived(
            optimizer.lr, "optimizer.lr" if "lr" in optimizer.model_fields_set else "default of optimizer.lr"
        )
    if optimizer.reference_batch is None:
        raise ConfigError(
            "no-reference-batch", f"optimizer.lr_rule is {optimizer.lr_rule}, but optimizer.reference_batch is not set."
        )
    ratio = batch / optimizer.reference_batch
    factor = ratio if optimizer.lr_rule == "linear" else sqrt(ratio)
    fraction = f"{batch}/{optimizer.reference_batch}"
    scale = fraction if optimizer.lr_rule == "linear" else f"√({fraction})"
    return Derived(optimizer.lr * factor, f"{optimizer.lr:g} × {scale}: lr_rule {optimizer.lr_rule}")


def _warmup(config: Config, steps: int, steps_per_epoch: int | None) -> Derived:
    warmup = config.schedule.warmup
    if warmup == 0:
        return Derived(0, "none")
    if warmup >= 1:
        return _in_steps(config, "warmup", int(warmup), steps_per_epoch)
    return Derived(max(1, round(warmup * steps)), f"{warmup:g} of {steps} steps")
