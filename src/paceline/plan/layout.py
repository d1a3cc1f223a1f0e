"""How many ranks lie on each axis.

A layout is data. What can be wrong with it is known from the recipe and the number of ranks, so it is found here,
before any rank starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from paceline.config.recipe import Config
from paceline.config.sections import LayoutSection
from paceline.errors import ConfigError, LayoutError

AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Degrees:
    """Ranks on each axis. One that is 1 wraps nothing."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        return prod(self.of(axis) for axis in AXES)

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data; those along `pipeline` and `tensor` read the same."""
        return self.replicate * self.shard

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole model."""
        return self.pipeline == self.shard == self.tensor == 1

    def of(self, axis: str) -> int:
        degree: int = getattr(self, axis)
        return degree

    def __str__(self) -> str:
        return " ".join(f"{axis}={self.of(axis)}" for axis in AXES if self.of(axis) > 1) or "one rank"


@dataclass(frozen=True)
class LayoutPlan:
    """A layout for a given number of ranks, and why it is that."""

    strategy: str
    degrees: Degrees
    reason: str


def derive_layout(config: Config, world: int, nodes: int = 1) -> LayoutPlan:
    """The layout that a recipe means on `world` ranks; what can't be is an error."""
    return _from_section(config, config.layout, world) if config.layout else _from_strategy(config, world, nodes)


def _from_strategy(config: Config, world: int, nodes: int) -> LayoutPlan:
    name = config.strategy
    if name in ("single", "dp", "split"):
        return _one_process(name, world)
    if name == "auto":
        if world == 1:
            return LayoutPlan("single", Degrees(), "one rank: nothing to wrap")
        # Until the model is there, and its size known (plan/memory.py).
        return LayoutPlan("ddp", Degrees(replicate=world), f"auto: {world} ranks, if each can hold the whole model")
    if name == "hsdp":
        return _hybrid(world, nodes)
    axis, words = {
        "ddp": ("replicate", "every rank holds the whole model and reads its own data"),
        "fsdp": ("shard", "weights, gradients and optimizer state are cut over all ranks"),
        "tp": ("tensor", "every layer is cut over all ranks, which read the same data"),
        "pp": ("pipeline", "a stage of layers on each rank"),
    }[name]
    return LayoutPlan(name, Degrees(**{axis: world}), words)


def _one_process(name: str, world: int) -> LayoutPlan:
    if world > 1:
        raise ConfigError(
            "single-in-a-world",
            f"The strategy is `{name}`, which is of one process, but this one is one of {world} ranks.",
            why="each rank would train its own model on the same data",
            fix="set strategy: ddp (or auto), or start one rank",
        )
    words = {
        "single": "one rank",
        "dp": "one process, a copy of the model on each GPU",
        "split": "one process, layers over its devices",
    }
    return LayoutPlan(name, Degrees(), words[name])


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


def _from_section(config: Config, section: LayoutSection, world: int) -> LayoutPlan:
    if config.strategy != "auto":
        raise LayoutError(
            "strategy-and-layout",
            f"strategy ({config.strategy}) and layout are both set.",
            why="a strategy is a name for a layout",
            fix="keep one of them",
        )
    asked = {axis: getattr(section, axis) for axis in AXES}
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
            f"{world} rank{'s' if world > 1 else ''}: {_written(asked)}.",
            fix=_fitting(asked, fixed, world, bool(open_axes)),
        )
    degrees = Degrees(**{axis: world // fixed if degree == "auto" else degree for axis, degree in asked.items()})
    rest = f"; {open_axes[0]} takes the rest of {world} ranks" if open_axes else ""
    return LayoutPlan("layout", degrees, f"as set{rest}")


def _written(asked: dict[str, int | str]) -> str:
    return " × ".join(f"{axis} {degree}" for axis, degree in asked.items() if degree != 1) or "all of them 1"


def _fitting(asked: dict[str, int | str], fixed: int, world: int, is_open: bool) -> str:
    free = [axis for axis in ("replicate", "shard", "pipeline", "tensor") if asked[axis] == 1]
    if world % fixed == 0 and not is_open and free:
        return f"set one axis to auto, e.g. {free[0]}: auto (it would be {world // fixed}), or start {fixed} ranks"
    return f"start a number of ranks that {fixed} divides, or change the degrees"
