"""What a model takes of a rank's memory under a layout, and which layout follows: `strategy: auto`, by arithmetic.

    weights + gradients + optimizer state + average      cut over shard, tensor and pipeline
    + two blocks' gathered weights and one's gradients   where weights are sharded
    ≤ 70 % of the memory; the rest is for activations, whose size depends on the batch

It is an estimate of what is certain. A layout that needs more than all of the memory is refused; one that would need
more than 70 % is not chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.components import OPTIMIZERS, PRECISIONS
from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.plan.layout import Degrees, LayoutPlan, derive_layout
from paceline.text import format_bytes, format_count

SHARE = 0.7  # of the memory, for what is certain
GATHERED_BLOCKS = 2  # the one that computes, and the next one
GIB = 2**30


@dataclass(frozen=True)
class ModelSize:
    """A model's numbers of parameters, and what it can be cut into."""

    trainable: int
    frozen: int = 0
    largest_block: int = 0  # the most that is gathered at once; a model without blocks is one block
    tensor_degrees: tuple[int, ...] = ()  # the degrees above 1 that its plan allows
    stages: int = 1  # the most stages that it can be cut into


@dataclass(frozen=True)
class MachineFacts:
    """What there is: ranks, how many machines they are on, and the memory that each of them has."""

    ranks: int
    nodes: int
    memory: int


@dataclass(frozen=True)
class BytesPerParam:
    """A trainable parameter's bytes, by what they are for."""

    weight: int
    gradient: int
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.optimizer + self.average

    def __str__(self) -> str:
        parts = {"weight": self.weight, "gradient": self.gradient, "optimizer": self.optimizer, "ema": self.average}
        return " + ".join(f"{name} {size}" for name, size in parts.items() if size)


def bytes_of(config: Config) -> BytesPerParam:
    """Weights stay in float32 whatever the precision computes in; so does all that the optimizer keeps."""
    size = PRECISIONS.facts(config.precision).param_bytes
    facts = OPTIMIZERS.facts(config.optimizer.name)
    states = facts.state_per_param + (facts.momentum_state if config.optimizer.momentum else 0)
    return BytesPerParam(size, size, size * states, size if config.ema else 0)


def needed(config: Config, size: ModelSize, degrees: Degrees) -> int:
    """Bytes that a rank needs for certain, without activations."""
    each = bytes_of(config)
    state = (size.trainable * each.total + size.frozen * each.weight) // degrees.parts("weights", "layers")
    if degrees.pipeline > 1:  # a stage holds one block at least
        state = max(state, size.largest_block * each.total // degrees.parts("weights"))
    if degrees.shard == 1:
        return state
    return state + _gathered(config, size, degrees.tensor)


def _gathered(config: Config, size: ModelSize, tensor: int) -> int:
    each = PRECISIONS.facts(config.precision).gather_bytes
    return size.largest_block * (GATHERED_BLOCKS * each + each) // tensor


def choose(config: Config, size: ModelSize, machine: MachineFacts) -> LayoutPlan:
    """The first of: replicated, sharded, tensor with sharding, pipeline, that leaves room for activations."""
    if machine.ranks == 1:
        return derive_layout(config, 1)
    each, room = bytes_of(config), SHARE * machine.memory
    per_node = machine.ranks // machine.nodes
    whole = needed(config, size, Degrees(replicate=machine.ranks))
    sign = (
        f"{format_count(size.trainable)} parameters × {each.total} bytes ({each}) = {format_bytes(whole)}; "
        f"{SHARE:.0%} of a rank's memory is {format_bytes(room)}"
    )
    if whole <= room:
        return LayoutPlan("ddp", Degrees(replicate=machine.ranks), f"auto: {sign}: each rank can hold the whole model")
    for plan in _cut(size, machine, per_node):
        need = needed(config, size, plan.degrees)
        if need <= room:
            return LayoutPlan(plan.strategy, plan.degrees, f"auto: {sign}; {plan.reason}: {format_bytes(need)}")
    raise _too_large(f"auto: {sign}", size, config, machine)


def _cut(size: ModelSize, machine: MachineFacts, per_node: int) -> list[LayoutPlan]:
    """Layouts that cut the model, the least talk between ranks first."""
    plans = []
    if machine.nodes > 1 and per_node > 1 and machine.ranks % machine.nodes == 0:
        degrees = Degrees(replicate=machine.nodes, shard=per_node)
        plans.append(
            LayoutPlan("hsdp", degrees, f"cut over the {per_node} ranks of a node, copied between {machine.nodes}")
        )
    plans.append(LayoutPlan("fsdp", Degrees(shard=machine.ranks), f"cut over {machine.ranks} ranks"))
    for degree in size.tensor_degrees:
        if per_node % degree == 0:
            rest = machine.ranks // degree
            plans.append(
                LayoutPlan(
                    "layout",
                    Degrees(shard=rest, tensor=degree),
                    f"a block is too large to be gathered: every layer cut in {degree}, and all over {rest}",
                )
            )
    if size.stages >= machine.ranks:
        plans.append(
            LayoutPlan("pp", Degrees(pipeline=machine.ranks), "a block is too large to be gathered: one stage a rank")
        )
    return plans


def require_room(config: Config, size: ModelSize, plan: LayoutPlan, machine: MachineFacts) -> None:
    """A layout that needs more than there is ends here, rather than out of memory in its first step."""
    need = needed(config, size, plan.degrees)
    if need > machine.memory and not config.fsdp.offload:
        raise _too_large(f"the layout {plan.degrees} needs {format_bytes(need)} a rank", size, config, machine)


def _too_large(what: str, size: ModelSize, config: Config, machine: MachineFacts) -> LayoutError:
    total = needed(config, size, Degrees())
    enough = int(total / (SHARE * machine.memory)) + 1
    return LayoutError(
        "does-not-fit",
        f"The model does not fit this machine: {what}, and a rank has {format_bytes(machine.memory)}.",
        why="weights, gradients and optimizer state are needed in every step, whatever the batch",
        fix=f"use more ranks (fsdp on about {enough} would do), fsdp: {{offload: true}} on GPUs, "
        "an optimizer with less state, or a smaller model",
    )
