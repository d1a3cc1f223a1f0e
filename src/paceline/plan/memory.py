"""Estimate of a model's memory per rank under a layout, from which `strategy: auto` chooses one.

    parameters + gradients + optimizer state + EMA + outer state     sharded over shard, tensor and pipeline
    + gathered parameters of two blocks and gradients of one block   with FSDP
    ≤ 70% of the memory; the rest is for activations, whose size depends on the batch

The estimate is a lower bound. A layout that needs more than 70% of the memory is not chosen, and one that needs more
than all of it is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.components import OPTIMIZERS, PRECISIONS
from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.plan.layout import Degrees, LayoutPlan, derive_layout
from paceline.text import format_bytes, format_count

SHARE = 0.7  # of the memory; the rest is for activations
GATHERED_BLOCKS = 2  # the current one and the prefetched one
GIB = 2**30


@dataclass(frozen=True)
class ModelSize:
    """The parameter counts of a model, and the degrees that it supports."""

    trainable: int
    frozen: int = 0
    largest_block: int = 0  # the whole model if it has no blocks
    tensor_degrees: tuple[int, ...] = ()  # degrees above 1 that its tensor-parallel plan supports
    stages: int = 1  # the maximum number of pipeline stages


@dataclass(frozen=True)
class MachineFacts:
    """The number of ranks and nodes, and the memory of each rank in bytes."""

    ranks: int
    nodes: int
    memory: int


@dataclass(frozen=True)
class BytesPerParam:
    """Bytes per trainable parameter."""

    weight: int
    gradient: int
    optimizer: int
    ema: int
    outer: int = 0  # of local steps: weights of the last round, momentum, error feedback

    @property
    def total(self) -> int:
        return self.weight + self.gradient + self.optimizer + self.ema + self.outer

    def __str__(self) -> str:
        return " + ".join(f"{name} {size}" for name, size in vars(self).items() if size)


def bytes_per_param(config: Config) -> BytesPerParam:
    """Mixed precision keeps parameters and optimizer state in float32."""
    size = PRECISIONS.facts(config.precision).param_bytes
    facts = OPTIMIZERS.facts(config.optimizer.name)
    states = facts.state_per_param + (facts.momentum_state if config.optimizer.momentum else 0)
    return BytesPerParam(size, size, size * states, size if config.ema else 0, max(size, 4) * _outer_states(config))


def _outer_states(config: Config) -> int:
    """How many values local steps keep for each parameter."""
    sync = config.sync
    if sync is None or sync.every is None:
        return 0
    nesterov = sync.outer.name == "nesterov"
    return (nesterov or sync.compress is not None) + nesterov + (sync.compress == "int8")


def required_bytes(config: Config, size: ModelSize, degrees: Degrees) -> int:
    """Bytes that a rank needs, without activations."""
    each = bytes_per_param(config)
    state = (size.trainable * each.total + size.frozen * each.weight) // degrees.parts("weights", "layers")
    if degrees.pipeline > 1:  # a stage holds at least one block
        state = max(state, size.largest_block * each.total // degrees.parts("weights"))
    if degrees.shard == 1:
        return state
    gathered = size.largest_block * (GATHERED_BLOCKS + 1) * PRECISIONS.facts(config.precision).gather_bytes
    return state + gathered // degrees.tensor


def choose_layout(config: Config, size: ModelSize, machine: MachineFacts) -> LayoutPlan:
    """The first of replicated, sharded, tensor-parallel with sharding and pipeline that leaves room for activations."""
    if machine.ranks == 1:
        return derive_layout(config, 1)
    each, room = bytes_per_param(config), SHARE * machine.memory
    per_node = machine.ranks // machine.nodes
    whole = required_bytes(config, size, Degrees(replicate=machine.ranks))
    arithmetic = (
        f"{format_count(size.trainable)} parameters × {each.total} bytes ({each}) = {format_bytes(whole)}; "
        f"{SHARE:.0%} of the memory of a rank is {format_bytes(room)}"
    )
    if whole <= room:
        return LayoutPlan("ddp", Degrees(replicate=machine.ranks), f"auto: {arithmetic}; each rank holds a replica")
    for plan in _sharded_layouts(size, machine, per_node):
        need = required_bytes(config, size, plan.degrees)
        if need <= room:
            return LayoutPlan(plan.strategy, plan.degrees, f"auto: {arithmetic}; {plan.reason}: {format_bytes(need)}")
    raise _too_large(f"auto: {arithmetic}", size, config, machine)


def _sharded_layouts(size: ModelSize, machine: MachineFacts, per_node: int) -> list[LayoutPlan]:
    """Layouts that shard the model, in ascending order of communication."""
    plans = []
    if machine.nodes > 1 and per_node > 1 and machine.ranks % machine.nodes == 0:
        degrees = Degrees(replicate=machine.nodes, shard=per_node)
        reason = f"sharded within a node ({per_node} ranks), replicated across {machine.nodes} nodes"
        plans.append(LayoutPlan("hsdp", degrees, reason))
    plans.append(LayoutPlan("fsdp", Degrees(shard=machine.ranks), f"sharded across {machine.ranks} ranks"))
    for degree in size.tensor_degrees:
        if per_node % degree == 0:
            rest = machine.ranks // degree
            reason = f"a block is too large to gather: tensor parallelism over {degree} ranks, sharded across {rest}"
            plans.append(LayoutPlan("layout", Degrees(shard=rest, tensor=degree), reason))
    if size.stages >= machine.ranks:
        reason = "a block is too large to gather: one pipeline stage per rank"
        plans.append(LayoutPlan("pp", Degrees(pipeline=machine.ranks), reason))
    return plans


def require_fit(config: Config, size: ModelSize, plan: LayoutPlan, machine: MachineFacts) -> None:
    """Reject a layout that would run out of memory in its first step."""
    need = required_bytes(config, size, plan.degrees)
    if need > machine.memory and not config.fsdp.offload:
        raise _too_large(f"layout {plan.degrees} needs {format_bytes(need)} per rank", size, config, machine)


def _too_large(what: str, size: ModelSize, config: Config, machine: MachineFacts) -> LayoutError:
    total = required_bytes(config, size, Degrees())
    enough = int(total / (SHARE * machine.memory)) + 1
    return LayoutError(
        "does-not-fit",
        f"The model does not fit in memory: {what}, but a rank has {format_bytes(machine.memory)}.",
        fix=f"use more ranks (fsdp on about {enough}), fsdp: {{offload: true}} on GPUs, "
        "an optimizer with less state, or a smaller model",
    )
