"""How many ranks lie on each axis.

A layout is data. What can be wrong with it is known from the recipe and the number of ranks, so it is found here,
before any rank starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from paceline.config.recipe import Config
from paceline.config.sections import LayoutSection
from paceline.errors import ConfigError, LayoutError
from paceline.text import plural


@dataclass(frozen=True)
class Axis:
    """What the ranks along an axis share, and what each of them has of its own."""

    name: str
    holds_apart: Literal["samples", "tokens", "weights", "layers"]  # what each rank holds another part of
    same_samples: bool  # its ranks read the same samples
    reduces_gradients: bool  # its ranks' gradients are contributions to one sum
    loss_on: Literal["every", "first", "last"]  # which of its ranks reports the loss


# From the outermost to the innermost: neighbours, which are on one node, communicate most.
AXES = (
    Axis("pipeline", "layers", same_samples=True, reduces_gradients=False, loss_on="last"),
    Axis("replicate", "samples", same_samples=False, reduces_gradients=True, loss_on="every"),
    Axis("shard", "weights", same_samples=False, reduces_gradients=True, loss_on="every"),
    Axis("tensor", "weights", same_samples=True, reduces_gradients=False, loss_on="first"),
)
AXIS_NAMES = tuple(axis.name for axis in AXES)


@dataclass(frozen=True)
class Degrees:
    """Ranks on each axis. One that is 1 wraps nothing."""

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
        """Whether every rank holds the whole model."""
        return self.parts("weights", "layers") == 1

    def parts(self, *kinds: str) -> int:
        """How many parts what is held apart (`weights`, `layers`, …) is in."""
        return self.along(axis for axis in AXES if axis.holds_apart in kinds)

    def along(self, axes: Iterable[Axis]) -> int:
        return prod(self.of(axis.name) for axis in axes)

    def of(self, axis: str) -> int:
        degree: int = getattr(self, axis)
        return degree

    def __str__(self) -> str:
        return " ".join(f"{name}={self.of(name)}" for name in AXIS_NAMES if self.of(name) > 1) or "one rank"


@dataclass(frozen=True)
class LayoutPlan:
    """A layout for a given number of ranks, and why it is that."""

    strategy: str
    degrees: Degrees
    reason: str


Planner = Callable[[int, int], LayoutPlan]  # from the numbers of ranks and nodes


def _auto(world: int, nodes: int) -> LayoutPlan:
    if world == 1:
        return LayoutPlan("single", Degrees(), "one rank: nothing to wrap")
    # Until the model is there, and its size known (plan/memory.py).
    return LayoutPlan("ddp", Degrees(replicate=world), f"auto: {world} ranks, if each can hold the whole model")


def _one_process(name: str, reason: str) -> Planner:
    def plan(world: int, nodes: int) -> LayoutPlan:
        if world > 1:
            raise ConfigError(
                "single-in-a-world",
                f"The strategy is `{name}`, which is of one process, but this one is one of {world} ranks.",
                why="each rank would train its own model on the same data",
                fix="set strategy: ddp (or auto), or start one rank",
            )
        return LayoutPlan(name, Degrees(), reason)

    return plan


def _along(name: str, axis: str, reason: str) -> Planner:
    """All ranks on one axis."""
    return lambda world, nodes: LayoutPlan(name, Degrees(**{axis: world}), reason)


def _hybrid(world: int, nodes: int) -> LayoutPlan:
    if nodes > 1 and world % nodes == 0:
        return LayoutPlan(
            "hsdp", Degrees(replicate=nodes, shard=world // nodes), "cut over a node's ranks, copied between nodes"
        )
    if nodes > 1:
        raise LayoutError(
            "uneven-nodes",
            f"The strategy is hsdp, but {world} ranks on {nodes} nodes are not the same number on each.",
            fix="start the same number of ranks on every node, or use strategy: fsdp",
        )
    if world % 2 == 0 and world > 2:
        return LayoutPlan(
            "hsdp", Degrees(replicate=2, shard=world // 2), "one node: two copies, each cut over half of the ranks"
        )
    return LayoutPlan("hsdp", Degrees(shard=world), f"one node and {world} ranks: one copy, cut over all of them")


STRATEGIES: Mapping[str, Planner] = {
    "auto": _auto,
    "single": _one_process("single", "one rank"),
    "dp": _one_process("dp", "one process, a copy of the model on each GPU"),
    "ddp": _along("ddp", "replicate", "every rank holds the whole model and reads its own data"),
    "fsdp": _along("fsdp", "shard", "weights, gradients and optimizer state are cut over all ranks"),
    "hsdp": _hybrid,
    "tp": _along("tp", "tensor", "every layer is cut over all ranks, which read the same data"),
    "pp": _along("pp", "pipeline", "a stage of layers on each rank"),
    "split": _one_process("split", "one process, layers over its devices"),
}


def derive_layout(config: Config, world: int, nodes: int = 1) -> LayoutPlan:
    """The layout that a recipe means on `world` ranks; what can't be is an error."""
    if config.layout is not None:
        return _from_section(config, config.layout, world)
    return STRATEGIES[config.strategy](world, nodes)


def _from_section(config: Config, section: LayoutSection, world: int) -> LayoutPlan:
    if config.strategy != "auto":
        raise LayoutError(
            "strategy-and-layout",
            f"strategy ({config.strategy}) and layout are both set.",
            why="a strategy is a name for a layout",
            fix="keep one of them",
        )
    asked = {name: getattr(section, name) for name in AXIS_NAMES}
    open_axes = [axis for axis, degree in asked.items() if degree == "auto"]
    fixed = prod(degree for degree in asked.values() if degree != "auto")
    if len(open_axes) > 1:
        raise LayoutError(
            "two-autos",
            f"layout.{' and layout.'.join(open_axes)} are both auto.",
            why="auto is the rest of the world, which one axis can take",
            fix="give a number to all but one",
        )
    if world % fixed or (not open_axes and fixed != world):
        raise LayoutError(
            "degrees-and-world",
            f"The layout's degrees multiply to {fixed}{' and a rest' if open_axes else ''}, but there are "
            f"{plural(world, 'rank')}: {_written(asked)}.",
            fix=_fitting(asked, fixed, world, bool(open_axes)),
        )
    degrees = Degrees(**{axis: world // fixed if degree == "auto" else degree for axis, degree in asked.items()})
    rest = f"; {open_axes[0]} takes the rest of {world} ranks" if open_axes else ""
    return LayoutPlan("layout", degrees, f"as set{rest}")


def _written(asked: dict[str, int | str]) -> str:
    return " × ".join(f"{axis} {degree}" for axis, degree in asked.items() if degree != 1) or "all of them 1"


def _fitting(asked: dict[str, int | str], fixed: int, world: int, is_open: bool) -> str:
    by_use = sorted(AXES, key=lambda axis: axis.same_samples)  # further data ranks need nothing of the model
    free = [axis.name for axis in by_use if asked[axis.name] == 1]
    if world % fixed == 0 and not is_open and free:
        return f"set one axis to auto, e.g. {free[0]}: auto (it would be {world // fixed}), or start {fixed} ranks"
    return f"start a number of ranks that {fixed} divides, or change the degrees"
