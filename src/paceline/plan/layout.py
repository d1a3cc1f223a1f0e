"""Derived values, each with the reason for it, and the first of them: the number of ranks on each parallelism axis.

A layout is plain data. It is validated here, from the recipe and the number of ranks, before any rank starts. The
Trainer, the planner and `paceline config show` use the same functions of this package, so what is shown is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from paceline.config.recipe import Config
from paceline.config.sections import LayoutSection
from paceline.errors import ConfigError, LayoutError
from paceline.text import columns, plural

FROM_SETTINGS = "requested"  # in a recipe or by a keyword of the Trainer
_LABELS = {"horizon": "total steps"}  # of rows, on screen


@dataclass(frozen=True)
class Derived:
    """A value and the reason for it."""

    value: int | float | str
    reason: str


def table(rows: Mapping[str, Derived]) -> str:
    """Derived values in three columns: name, value, reason."""
    return columns(("", _LABELS.get(name, name), _value(row.value), row.reason) for name, row in rows.items())


def _value(value: int | float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Axis:
    """What the ranks along an axis share, and what is partitioned across them."""

    name: str
    partitions: Literal["samples", "tokens", "weights", "layers"]
    same_samples: bool  # its ranks read the same samples
    reduces_gradients: bool  # gradients are reduced across its ranks
    loss_on: Literal["every", "first", "last"]  # the ranks that report the loss


# From the outermost to the innermost: the ranks of inner axes are on the same node, where communication is fastest.
AXES = (
    Axis("pipeline", "layers", same_samples=True, reduces_gradients=False, loss_on="last"),
    Axis("replicate", "samples", same_samples=False, reduces_gradients=True, loss_on="every"),
    Axis("shard", "weights", same_samples=False, reduces_gradients=True, loss_on="every"),
    Axis("tensor", "weights", same_samples=True, reduces_gradients=False, loss_on="first"),
)
AXIS_NAMES = tuple(axis.name for axis in AXES)


@dataclass(frozen=True)
class Degrees:
    """The number of ranks on each axis. An axis of degree 1 is disabled."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        return self.along(AXES)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data."""
        return self.along(axis for axis in AXES if not axis.same_samples)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full model."""
        return self.parts("weights", "layers") == 1

    def parts(self, *kinds: str) -> int:
        """The number of parts that these (`weights`, `layers`, …) are partitioned into."""
        return self.along(axis for axis in AXES if axis.partitions in kinds)

    def along(self, axes: Iterable[Axis]) -> int:
        return prod(self.of(axis.name) for axis in axes)

    def of(self, axis: str) -> int:
        degree: int = getattr(self, axis)
        return degree

    def __str__(self) -> str:
        return " ".join(f"{name}={self.of(name)}" for name in AXIS_NAMES if self.of(name) > 1) or "one rank"


@dataclass(frozen=True)
class LayoutPlan:
    """A layout for a given number of ranks, and the reason for it."""

    strategy: str
    degrees: Degrees
    reason: str


Planner = Callable[[int, int], LayoutPlan]  # arguments: number of ranks, number of nodes


def _auto(world: int, nodes: int) -> LayoutPlan:
    if world == 1:
        return LayoutPlan("single", Degrees(), "one rank")
    # Provisional: plan/memory.py decides once the size of the model is known.
    return LayoutPlan("ddp", Degrees(replicate=world), f"auto: {world} ranks, if the model fits on each of them")


def _one_process(name: str, reason: str) -> Planner:
    def plan(world: int, nodes: int) -> LayoutPlan:
        if world > 1:
            raise ConfigError(
                "single-in-a-world", f"strategy: {name} runs in one process, but there are {world} ranks."
            )
        return LayoutPlan(name, Degrees(), reason)

    return plan


def _along(name: str, axis: str, reason: str) -> Planner:
    """All ranks on one axis."""
    return lambda world, nodes: LayoutPlan(name, Degrees(**{axis: world}), reason)


def _hybrid(world: int, nodes: int) -> LayoutPlan:
    if nodes > 1 and world % nodes:
        raise LayoutError(
            "uneven-nodes",
            f'strategy="hsdp" requires the same number of ranks on every node, got {world} ranks on {nodes} nodes.',
        )
    replicas, reason = nodes, "sharded within a node, replicated across nodes"
    if nodes == 1 and world % 2 == 0 and world > 2:
        replicas, reason = 2, "one node: 2 replicas, each sharded across half the ranks"
    elif nodes == 1:
        reason = f"one node: sharded across all {world} ranks"
    return LayoutPlan("hsdp", Degrees(replicate=replicas, shard=world // replicas), reason)


STRATEGIES: Mapping[str, Planner] = {
    "auto": _auto,
    "single": _one_process("single", "one rank"),
    "dp": _one_process("dp", "one process, a replica of the model on each GPU"),
    "ddp": _along("ddp", "replicate", "every rank holds a replica of the model and reads different data"),
    "fsdp": _along("fsdp", "shard", "parameters, gradients and optimizer state are sharded across all ranks"),
    "hsdp": _hybrid,
    "tp": _along("tp", "tensor", "every layer is sharded across all ranks, which read the same data"),
    "pp": _along("pp", "pipeline", "one pipeline stage on each rank"),
    "split": _one_process("split", "one process, layers split over its devices"),
}


def derive_layout(config: Config, world: int, nodes: int = 1) -> LayoutPlan:
    """The layout of a recipe on `world` ranks. Raises LayoutError for an invalid one."""
    if config.layout is not None:
        return _from_section(config, config.layout, world)
    return STRATEGIES[config.strategy](world, nodes)


def _from_section(config: Config, section: LayoutSection, world: int) -> LayoutPlan:
    if config.strategy != "auto":
        raise LayoutError("strategy-and-layout", f"strategy ({config.strategy}) and layout are both set.")
    requested = {name: getattr(section, name) for name in AXIS_NAMES}
    open_axes = [axis for axis, degree in requested.items() if degree == "auto"]
    fixed = prod(degree for degree in requested.values() if degree != "auto")
    if len(open_axes) > 1:
        raise LayoutError("two-autos", f"layout.{' and layout.'.join(open_axes)} are both auto.")
    if world % fixed or (not open_axes and fixed != world):
        raise LayoutError(
            "degrees-and-world",
            f"The degrees of the layout multiply to {fixed}, which {'does not divide' if open_axes else 'is not'} the "
            f"number of ranks, {world}: {_product(requested)}.",
            fix=_suggestion(requested, fixed, world, bool(open_axes)),
        )
    degrees = Degrees(**{axis: world // fixed if degree == "auto" else degree for axis, degree in requested.items()})
    rest = f"; {open_axes[0]} takes the remaining ranks of {world}" if open_axes else ""
    return LayoutPlan("layout", degrees, f"{FROM_SETTINGS}{rest}")


def _product(requested: dict[str, int | str]) -> str:
    return " × ".join(f"{axis} {degree}" for axis, degree in requested.items() if degree != 1) or "every degree 1"


def _suggestion(requested: dict[str, int | str], fixed: int, world: int, is_open: bool) -> str:
    by_use = sorted(AXES, key=lambda axis: axis.same_samples)  # additional data ranks require nothing of the model
    free = [axis.name for axis in by_use if requested[axis.name] == 1]
    if world % fixed == 0 and not is_open and free:
        degree = plural(world // fixed, "rank")
        return f"set one axis to auto, e.g. {free[0]}: auto ({degree}), or launch {plural(fixed, 'rank')}"
    return f"launch a multiple of {fixed} ranks, or change the degrees"
