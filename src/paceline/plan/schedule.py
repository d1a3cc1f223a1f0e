"""The learning rate over a run: horizon, warm-up, cuts and highest rate, in optimizer steps.

Apart from `plan/batch.py`, because it can be answered later only: it needs the length of the data as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from paceline.config.components import SCHEDULES
from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.derived import Derived
from paceline.text import plural


@dataclass(frozen=True)
class SchedulePlan:
    """The learning rate over a run's steps."""

    lr: Derived
    steps: Derived  # the horizon; 0 where it is not known and not needed
    warmup: Derived
    fall: Derived | None = None  # wsd: the step at which the way down begins
    every: Derived | None = None  # step: cut after every so many steps …
    cuts: tuple[Derived, ...] = ()  # … or after these, in ascending order

    def rows(self) -> dict[str, Derived]:
        """Only what bears on this run: no warm-up of zero steps, no horizon where it is not known."""
        rows = {"learning rate": self.lr, "horizon": self.steps, "warm-up": self.warmup}
        rows = {name: row for name, row in rows.items() if row.value}
        if self.fall is not None:
            rows["falls from"] = self.fall
        if self.every is not None:
            rows["cut every"] = self.every
        if self.cuts:
            rows["cuts at"] = Derived(", ".join(str(cut.value) for cut in self.cuts), self.cuts[0].reason)
        return rows


def derive_schedule(
    config: Config,
    batch: int,
    steps_per_epoch: int | None,
    epochs: int | None,
    max_steps: int | None,
    *,
    endless: bool = False,
) -> SchedulePlan:
    """Everything that a schedule needs, in optimizer steps, whatever unit the recipe counts in.

    A loop of the user's own is `endless`: it has to know its horizon only where the schedule needs one.
    """
    steps = _horizon(config, steps_per_epoch, epochs, max_steps, endless)
    every, cuts = _cuts(config, steps_per_epoch)
    return SchedulePlan(
        lr=learning_rate(config, batch),
        steps=steps,
        warmup=_warmup(config, int(steps.value), steps_per_epoch),
        fall=_fall(config, int(steps.value)),
        every=every,
        cuts=cuts,
    )


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
        raise ConfigError(
            "no-end",
            "Nothing says when training ends.",
            fix="give epochs or max_steps: trainer.train(data, epochs=3), or train.epochs=3",
        )
    if SCHEDULES.facts(config.schedule.name).needs_horizon or 0 < config.schedule.warmup < 1:
        raise ConfigError(
            "no-horizon",
            f"The schedule {config.schedule.name!r} needs to know the number of steps, but the data has no length.",
            fix="set schedule.steps or max_steps",
        )
    return Derived(0, "until it ends: nothing says when")


def total_steps(per_epoch: int | None, epochs: int | None, max_steps: int | None) -> int | None:
    """How many steps a run has at most; None where that is not known."""
    totals = [] if epochs is None or per_epoch is None else [epochs * per_epoch]
    if max_steps is not None:
        totals.append(max_steps)
    return min(totals, default=None)


def _in_steps(config: Config, key: str, number: int, steps_per_epoch: int | None) -> Derived:
    """A setting of the schedule, converted from the unit that the recipe counts in."""
    if config.schedule.unit == "steps":
        return Derived(number, f"schedule.{key}")
    if steps_per_epoch is None:
        raise ConfigError(
            "no-horizon",
            f"schedule.{key} is counted in epochs, but the data has no length.",
            why="how many steps an epoch has is known only at its end",
            fix="set schedule.unit: steps",
        )
    sign = f"{plural(number, 'epoch')} × {plural(steps_per_epoch, 'step')}"
    return Derived(number * steps_per_epoch, f"schedule.{key}: {sign}")


def _fall(config: Config, steps: int) -> Derived | None:
    if config.schedule.name != "wsd":
        return None
    part = config.schedule.decay
    return Derived(steps - max(1, round(part * steps)), f"the last {part:g} of {steps} steps")


def _cuts(config: Config, steps_per_epoch: int | None) -> tuple[Derived | None, tuple[Derived, ...]]:
    """Where the `step` schedule cuts: after every so many steps, or after given ones."""
    schedule = config.schedule
    if schedule.name != "step":
        return None, ()
    if schedule.every is None and not schedule.at:
        raise ConfigError(
            "no-cuts",
            "The schedule 'step' does not say when to cut the learning rate.",
            fix="set schedule.every, e.g. 30, or schedule.at, e.g. [30, 60]",
        )
    if schedule.every is not None and schedule.at:
        raise ConfigError(
            "contradiction",
            f"schedule.every ({schedule.every}) and schedule.at ({schedule.at}) are both set.",
            fix="keep one of them",
        )
    if schedule.every is not None:
        return _in_steps(config, "every", schedule.every, steps_per_epoch), ()
    return None, tuple(_in_steps(config, "at", number, steps_per_epoch) for number in sorted(schedule.at))


def learning_rate(config: Config, batch: int) -> Derived:
    optimizer = config.optimizer
    if optimizer.lr_rule == "none":
        return Derived(optimizer.lr, "optimizer.lr; lr_rule: none")
    if optimizer.reference_batch is None:
        raise ConfigError(
            "no-reference-batch",
            f"optimizer.lr_rule is {optimizer.lr_rule}, but optimizer.reference_batch is not set.",
            why="the rule scales the learning rate by batch / reference_batch",
            fix="set optimizer.reference_batch to the batch for which lr was chosen",
        )
    ratio = batch / optimizer.reference_batch
    factor = ratio if optimizer.lr_rule == "linear" else sqrt(ratio)
    sign = f"{batch}/{optimizer.reference_batch}"
    how = sign if optimizer.lr_rule == "linear" else f"√({sign})"
    return Derived(optimizer.lr * factor, f"{optimizer.lr:g} × {how}: lr_rule {optimizer.lr_rule}")


def _warmup(config: Config, steps: int, steps_per_epoch: int | None) -> Derived:
    warmup = config.schedule.warmup
    if warmup == 0:
        return Derived(0, "none set")
    if warmup >= 1:
        return _in_steps(config, "warmup", int(warmup), steps_per_epoch)
    return Derived(max(1, round(warmup * steps)), f"{warmup:g} of {steps} steps")
