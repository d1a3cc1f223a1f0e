"""Values that follow from others, each with its reason.

The Trainer, the planner and `paceline config show` all ask here, so what is shown can't differ from what runs. Two
questions, because they can be answered at different times: `derive_batch` needs the world, `derive_schedule` needs
the length of the data as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from paceline.config.components import SCHEDULES
from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.layout import LayoutPlan as Layout

DEFAULT_BATCH = 32
FROM_RECIPE = "as set"


@dataclass(frozen=True)
class Derived:
    """A value and why it is that."""

    value: int | float | str
    reason: str


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is made up, on a given number of ranks."""

    layout: Layout
    batch: Derived
    micro_batch: Derived
    accumulate: Derived

    @property
    def size(self) -> int:
        return int(self.batch.value)

    @property
    def groups(self) -> int:
        return int(self.accumulate.value)

    def rows(self) -> dict[str, Derived]:
        return {
            "world": Derived(self.layout.degrees.world, "ranks in the process group"),
            "strategy": Derived(self.layout.strategy, self.layout.reason),
            "layout": Derived(str(self.layout.degrees), f"{_count(self.layout.degrees.data_ranks, 'data rank')}"),
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
        }


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


def derive_batch(config: Config, layout: Layout, loader_batch: int | None = None) -> BatchPlan:
    """Any two of batch, micro_batch and accumulate give the third; `loader_batch` is the data's own."""
    ranks = layout.degrees.data_ranks
    batch = _global_batch(config, ranks, loader_batch)
    micro, accumulate = _micro_batch(config), config.accumulate
    size = int(batch.value)
    if micro is not None and accumulate is not None:
        if ceil(size / (accumulate * ranks)) != micro:
            raise _disagreement(size, micro, accumulate, ranks)
        derived_micro, derived_groups = Derived(micro, FROM_RECIPE), Derived(accumulate, FROM_RECIPE)
    elif micro is not None:
        groups = ceil(size / (micro * ranks))
        derived_micro = Derived(micro, FROM_RECIPE)
        derived_groups = Derived(groups, f"batch {size} / ({micro} a rank × {_count(ranks, 'data rank')}), rounded up")
    else:
        groups = accumulate or 1
        derived_groups = Derived(groups, FROM_RECIPE if accumulate else "no micro_batch set: one group")
        derived_micro = Derived(
            ceil(size / (groups * ranks)),
            f"batch {size} / ({_count(groups, 'group')} × {_count(ranks, 'data rank')}), rounded up",
        )
    if int(derived_groups.value) > size:
        raise ConfigError(
            "more-groups-than-samples",
            f"accumulate is {derived_groups.value}, but the batch holds {size} samples.",
            fix="lower accumulate or raise batch",
        )
    return BatchPlan(layout, batch, derived_micro, derived_groups)


def _micro_batch(config: Config) -> int | None:
    """`auto` is replaced by a number before training; until then nothing is known of it."""
    return None if config.micro_batch == "auto" else config.micro_batch


def _global_batch(config: Config, ranks: int, loader_batch: int | None) -> Derived:
    if config.batch is not None and config.batch_per_rank is not None:
        raise ConfigError(
            "contradiction",
            f"batch ({config.batch}) and batch_per_rank ({config.batch_per_rank}) are both set.",
            fix="keep batch: then the run means the same on any number of ranks",
        )
    per_rank = None if config.batch_per_rank is None else config.batch_per_rank * ranks
    wanted = config.batch or per_rank
    if None not in (loader_batch, wanted) and loader_batch != wanted:
        raise ConfigError(
            "contradiction",
            f"The settings ask for a batch of {wanted}, but the data's own is {loader_batch}.",
            why="a DataLoader's batch size, or that of ready batches, is the global batch",
            fix="set one of them, or make them equal",
        )
    if config.batch is not None:
        return Derived(config.batch, FROM_RECIPE)
    if config.batch_per_rank is not None:
        return _per_rank(config.batch_per_rank, ranks, f"{config.batch_per_rank} a rank × {_count(ranks, 'data rank')}")
    if loader_batch is not None:
        return Derived(loader_batch, "the data's own: a DataLoader's batch size is the global batch")
    micro = _micro_batch(config)
    if micro is not None:
        groups = config.accumulate or 1
        return _per_rank(
            micro * groups, ranks, f"micro_batch {micro} × {_count(groups, 'group')} × {_count(ranks, 'data rank')}"
        )
    return Derived(DEFAULT_BATCH, "the default: no batch was set")


def _per_rank(samples: int, ranks: int, arithmetic: str) -> Derived:
    return Derived(samples * ranks, f"{arithmetic}: this run depends on the number of ranks")


def _disagreement(size: int, micro: int, accumulate: int, ranks: int) -> ConfigError:
    return ConfigError(
        "contradiction",
        f"batch {size}, micro_batch {micro} and accumulate {accumulate} do not agree on {ranks} data ranks.",
        why=f"{size} samples in {accumulate} groups over {ranks} ranks are "
        f"{ceil(size / (accumulate * ranks))} a rank, not {micro}",
        fix="leave one of the three out: it follows from the other two",
    )


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
        return Derived(epochs * steps_per_epoch, f"{_count(epochs, 'epoch')} × {_count(steps_per_epoch, 'step')}")
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
    sign = f"{_count(number, 'epoch')} × {_count(steps_per_epoch, 'step')}"
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


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
