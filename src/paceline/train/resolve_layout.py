"""The layout of a run, once its model is known: resolve `auto`, and refuse a layout that does not fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import nn
from torch.optim import SGD, Adafactor, Optimizer

from paceline.config.recipe import Config
from paceline.config.sections import OptimizerSection as Settings
from paceline.errors import LayoutError
from paceline.models.spec import find_blocks, spec_of
from paceline.parallel.tensor.apply import check_plan
from paceline.plan import memory as plan_memory
from paceline.plan.layout import LayoutPlan
from paceline.plan.memory import MachineFacts, ModelSize
from paceline.plan.passes import require_allowed
from paceline.runtime import collectives
from paceline.runtime.device import memory_of
from paceline.runtime.process_group import World


def resolve(
    plan: LayoutPlan, config: Config, model: nn.Module, world: World, optimizer: Optimizer | None
) -> LayoutPlan:
    """Resolve for the machine with the least memory. Collective: must be called on every rank."""
    if optimizer is not None:
        config = config.model_copy(update={"optimizer": _equivalent_settings(optimizer)})
    memory = min(collectives.all_gather_object(memory_of(world.device, world.rank_info.local_world)))
    return resolve_on(plan, config, model, MachineFacts(world.size, world.rank_info.nodes, memory))


def resolve_on(plan: LayoutPlan, config: Config, model: nn.Module, machine: MachineFacts) -> LayoutPlan:
    size = _size_of(model, config.blocks, _tensor_degrees(config, model, machine.ranks))
    if config.strategy == "auto" and config.layout is None:
        plan = plan_memory.choose_layout(config, size, machine)
        require_allowed(config, plan)
    if config.strategy not in ("split", "dp"):
        plan_memory.require_fit(config, size, plan, machine)
    return plan


def _size_of(model: nn.Module, blocks: Sequence[str] | None = None, degrees: Sequence[int] = ()) -> ModelSize:
    """`degrees` are the tensor degrees that the model supports. Tied parameters count once."""
    found = [module for _, module in find_blocks(model, blocks)]
    inside = {id(parameter) for block in found for parameter in block.parameters()}
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)
    of_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in found]
    return ModelSize(
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        largest_block=max([rest, *of_blocks]),
        tensor_degrees=tuple(degrees),
        stages=len(found) if isinstance(model, nn.Sequential) or spec_of(model).pipeline is not None else 1,
    )


def _equivalent_settings(optimizer: Optimizer) -> Settings:
    """Recipe settings with the same state per parameter; AdamW's for an unknown optimizer."""
    if isinstance(optimizer, SGD):
        has_momentum = any(group["momentum"] for group in optimizer.param_groups)
        return Settings(name="sgd", momentum=0.9 if has_momentum else None)
    return Settings(name="adafactor" if isinstance(optimizer, Adafactor) else "adamw")


def _tensor_degrees(config: Config, model: nn.Module, ranks: int) -> list[int]:
    """The tensor-parallel degrees that the model's plan allows."""
    allowed = []
    for degree in range(2, ranks + 1):
        with suppress(LayoutError):
            if ranks % degree == 0:
                check_plan(model, config.tensor, degree)
                allowed.append(degree)
    return allowed
