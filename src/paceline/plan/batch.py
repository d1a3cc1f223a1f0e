"""How one optimizer step is made up: batch, micro-batch and accumulation on a layout's data ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.derived import FROM_RECIPE, Derived
from paceline.plan.layout import LayoutPlan
from paceline.text import plural

DEFAULT_BATCH = 32


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is made up, on a given number of ranks."""

    layout: LayoutPlan
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
            "layout": Derived(str(self.layout.degrees), plural(self.layout.degrees.data_ranks, "data rank")),
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
        }


def derive_batch(config: Config, layout: LayoutPlan, loader_batch: int | None = None) -> BatchPlan:
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
        derived_groups = Derived(groups, f"batch {size} / ({micro} a rank × {plural(ranks, 'data rank')}), rounded up")
    else:
        groups = accumulate or 1
        derived_groups = Derived(groups, FROM_RECIPE if accumulate else "no micro_batch set: one group")
        derived_micro = Derived(
            ceil(size / (groups * ranks)),
            f"batch {size} / ({plural(groups, 'group')} × {plural(ranks, 'data rank')}), rounded up",
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
        return _per_rank(config.batch_per_rank, ranks, f"{config.batch_per_rank} a rank × {plural(ranks, 'data rank')}")
    if loader_batch is not None:
        return Derived(loader_batch, "the data's own: a DataLoader's batch size is the global batch")
    micro = _micro_batch(config)
    if micro is not None:
        groups = config.accumulate or 1
        return _per_rank(
            micro * groups, ranks, f"micro_batch {micro} × {plural(groups, 'group')} × {plural(ranks, 'data rank')}"
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
