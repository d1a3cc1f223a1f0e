"""The batch of one optimizer step: global batch, micro-batch and gradient accumulation on a layout's data ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm

from paceline.config.recipe import Config
from paceline.errors import ConfigError, LayoutError
from paceline.plan.layout import FROM_SETTINGS, Derived, LayoutPlan
from paceline.text import plural

DEFAULT_BATCH = 32


@dataclass(frozen=True)
class BatchPlan:
    """Batch, micro-batch and accumulation on a given number of ranks."""

    layout: LayoutPlan
    batch: Derived
    micro_batch: Derived
    accumulate: Derived
    slices: int | None = None  # of a batch, with deterministic: everywhere

    @property
    def size(self) -> int:
        return int(self.batch.value)

    @property
    def groups(self) -> int:
        return int(self.accumulate.value)

    def rows(self) -> dict[str, Derived]:
        rows = {
            "world": Derived(self.layout.degrees.world, "ranks in the process group"),
            "strategy": Derived(self.layout.strategy, self.layout.reason),
            "layout": Derived(str(self.layout.degrees), plural(self.layout.degrees.data_ranks, "data rank")),
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
        }
        if self.slices is not None:
            rows["slices"] = Derived(
                self.slices, "added in a fixed order on any number of ranks; one CPU thread per rank"
            )
        return rows


def derive_batch(config: Config, layout: LayoutPlan, loader_batch: int | None = None) -> BatchPlan:
    """Any two of batch, micro_batch and accumulate determine the third. `loader_batch` is that of a DataLoader."""
    ranks = layout.degrees.data_ranks
    data_ranks = plural(ranks, "data rank")
    batch = _global_batch(config, ranks, loader_batch)
    if config.fixed_order:
        return _in_slices(config, layout, batch)
    micro, accumulate = _micro_batch(config), config.accumulate
    size = int(batch.value)
    if micro is not None and accumulate is not None:
        if ceil(size / (accumulate * ranks)) != micro:
            raise _inconsistent(size, micro, accumulate, ranks)
        derived_micro, derived_groups = Derived(micro, FROM_SETTINGS), Derived(accumulate, FROM_SETTINGS)
    elif micro is not None:
        groups = ceil(size / (micro * ranks))
        derived_micro = Derived(micro, FROM_SETTINGS)
        derived_groups = Derived(groups, f"batch {size} / ({micro} per rank × {data_ranks}), rounded up")
    else:
        groups = accumulate or 1
        derived_groups = Derived(groups, FROM_SETTINGS if accumulate else "default: no gradient accumulation")
        derived_micro = Derived(
            ceil(size / (groups * ranks)),
            f"batch {size} / ({plural(groups, 'accumulation step')} × {data_ranks}), rounded up",
        )
    groups = int(derived_groups.value)
    if groups > size:
        raise ConfigError(
            "more-groups-than-samples",
            f"accumulate is {groups}, but the batch contains only {plural(size, 'sample')}.",
            why=f"batch ({size}) is the samples of one optimizer step over all ranks; accumulate splits it, and does "
            "not enlarge it as in other libraries",
            fix=f"set accumulate to at most {size}; or, coming from another library, batch={size * groups} "
            f"({size} × {groups}{f'; × {data_ranks}, if {size} was per rank' if ranks > 1 else ''})",
        )
    return BatchPlan(layout, batch, derived_micro, derived_groups)


def _micro_batch(config: Config) -> int | None:
    """`auto` is replaced by a number before training; until then it is unknown."""
    return None if config.micro_batch == "auto" else config.micro_batch


def _global_batch(config: Config, ranks: int, loader_batch: int | None) -> Derived:
    if config.batch is not None and config.batch_per_rank is not None:
        raise ConfigError(
            "contradiction",
            f"batch ({config.batch}) and batch_per_rank ({config.batch_per_rank}) are both set.",
            fix="set only batch, which is independent of the number of ranks",
        )
    per_rank = None if config.batch_per_rank is None else config.batch_per_rank * ranks
    requested = config.batch or per_rank
    if None not in (loader_batch, requested) and loader_batch != requested:
        raise ConfigError(
            "contradiction",
            f"The requested batch is {requested}, but the data has a batch size of {loader_batch}.",
            why="the batch size of a DataLoader or of an iterable of batches is the global batch",
            fix="set only one of them, or make them equal; an iterable must yield batches, not samples",
        )
    if config.batch is not None:
        return Derived(config.batch, FROM_SETTINGS)
    if config.batch_per_rank is not None:
        return _per_rank(config, config.batch_per_rank, ranks, f"{config.batch_per_rank} per rank")
    if loader_batch is not None:
        return Derived(loader_batch, "batch size of the DataLoader; the sum over ranks if it has a DistributedSampler")
    micro = _micro_batch(config)
    if micro is not None:
        groups = config.accumulate or 1
        return _per_rank(config, micro * groups, ranks, f"micro_batch {micro} × {plural(groups, 'accumulation step')}")
    return Derived(DEFAULT_BATCH, "default")


def _per_rank(config: Config, samples: int, ranks: int, arithmetic: str) -> Derived:
    if config.fixed_order:
        raise ConfigError(
            "contradiction",
            f"deterministic: everywhere, but the batch is {arithmetic} × {plural(ranks, 'data rank')}.",
            why="on another number of ranks it would be another batch, and another result",
            fix="set batch, the samples of a step over all ranks",
        )
    reason = f"{arithmetic} × {plural(ranks, 'data rank')}: the result depends on the number of ranks"
    return Derived(samples * ranks, reason)


def _inconsistent(size: int, micro: int, accumulate: int, ranks: int) -> ConfigError:
    data_ranks = plural(ranks, "data rank")
    return ConfigError(
        "contradiction",
        f"batch {size}, micro_batch {micro} and accumulate {accumulate} are inconsistent on {data_ranks}.",
        why=f"{size} / ({plural(accumulate, 'accumulation step')} × {data_ranks}) is "
        f"{ceil(size / (accumulate * ranks))} per rank, not {micro}",
        fix="remove one of the three; it is derived from the other two",
    )


def _in_slices(config: Config, layout: LayoutPlan, batch: Derived) -> BatchPlan:
    """A batch in slices, the same on any number of ranks; each is a micro-batch."""
    size, ranks = int(batch.value), layout.degrees.data_ranks
    slices, micro = min(config.slices, size), _micro_batch(config)
    named = f"{slices} slices" if slices == config.slices else f"{slices} slices (one for each sample)"
    rows, data_ranks = ceil(size / slices), plural(ranks, "data rank")
    if slices % ranks:
        more = [number for number in (lcm(slices, ranks), ceil(slices / ranks) * ranks) if number <= size]
        raise LayoutError(
            "slices-and-ranks",
            f"A batch of {size} is computed in {named}, which {data_ranks} can't share equally.",
            fix=(f"set slices: {more[0]} in all runs to compare" if more else f"set batch to a multiple of {ranks}")
            + f", or launch a number of ranks that divides {slices}",
        )
    if micro is not None and micro < rows:
        raise ConfigError(
            "slices-and-micro-batch",
            f"micro_batch is {micro}, but a batch of {size} in {named} has up to {plural(rows, 'sample')} in each.",
            fix=f"set slices: {_enough_slices(slices, size, micro)} in all runs to compare, or remove micro_batch",
        )
    ignored = [key for key, value in (("micro_batch", micro), ("accumulate", config.accumulate)) if value is not None]
    note = f"; {' and '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no effect" if ignored else ""
    reason = f"batch {size} in {named}, rounded up (deterministic: everywhere{note})"
    groups = Derived(slices // ranks, f"{named} / {data_ranks}")
    return BatchPlan(layout, batch, Derived(rows, reason), groups, slices)


def _enough_slices(slices: int, size: int, micro: int) -> int:
    """The smallest multiple with at most `micro` samples in each; one for each sample if there is none."""
    return next((more for more in range(slices, size, slices) if ceil(size / more) <= micro), size)
