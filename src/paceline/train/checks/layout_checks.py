"""The layout of a run, once its model is known: resolve `auto`, and refuse what the layout, the model or the memory
does not allow. Each combination is refused here only, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import SGD, Adafactor, Optimizer

from paceline.config.recipe import Config
from paceline.config.sections import OptimizerSection as Settings
from paceline.errors import LayoutError
from paceline.log import Log
from paceline.models.loss_module import parameters_of_loss
from paceline.models.spec import find_blocks, spec_of
from paceline.parallel.data_parallel import CommHook
from paceline.plan import memory as plan_memory
from paceline.plan.layout import LayoutPlan, derive_layout
from paceline.plan.memory import MachineFacts, ModelSize
from paceline.plan.passes import require_allowed, uses_local_steps
from paceline.runtime import collectives, consistency
from paceline.runtime.device import memory_of
from paceline.runtime.mesh import Mesh
from paceline.runtime.process_group import World
from paceline.train.checks import same_model, unsupported, wrapped_model
from paceline.train.trainer_kwargs import UserObjects

if TYPE_CHECKING:
    from paceline.parallel.pipeline.stage_partition import StagePartition


def check_layout(
    config: Config, model: nn.Module, user: UserObjects, hook: CommHook | None, world: World, log: Log
) -> tuple[LayoutPlan, StagePartition | None]:
    """The layout, and the stages of a pipeline. Collective: must be called on every rank."""
    unsupported.require_initialized(model)
    plan = derive_layout(config, world.size, world.rank_info.nodes)
    partition = check_plan_of(config, model, plan)
    hook_name = {} if hook is None else {"comm_hook": hook.name}
    consistency.require_same_recipe(collectives.all_gather_object({**config.to_dict(), **hook_name}))
    same_model.require_same_model(model, user.optimizer, user.criterion)
    layout = _resolve(plan, config, model, world, user.optimizer)
    if layout.degrees.pipeline != plan.degrees.pipeline:
        partition = _partition(config, model, layout)
    unsupported.require_supported(model, config, layout.degrees)
    if hook is not None:
        wrapped_model.require_ddp(hook, config, layout.degrees, log)
    unsupported.require_replicated_criterion(user.stateful_loss, config, layout.degrees)
    if partition is not None and user.loss_fn is not None:
        raise LayoutError("pipeline-and-loss-fn", "loss_fn(model, batch) is not supported by a pipeline.")
    if user.optimizer is not None:
        named = [*model.named_parameters(), *parameters_of_loss(user.stateful_loss)]
        unsupported.check_parameters(named, user.optimizer, log)
    return layout, partition


def build_mesh(config: Config, layout: LayoutPlan, world: World) -> Mesh:
    """Collective: must be called on every rank."""
    apart = layout.degrees.replicate if uses_local_steps(config, layout.degrees) else 1
    return Mesh.build(layout.degrees, world, always=config.fsdp.offload, local_replicas=apart)


def check_plan_of(config: Config, model: nn.Module, plan: LayoutPlan) -> StagePartition | None:
    """Refuse settings and models that a layout does not support, on the full model, which may be on the meta device.
    Returns the stages of a pipeline."""
    require_allowed(config, plan)
    if plan.degrees.tensor > 1:
        from paceline.parallel.tensor.apply import check_plan  # few runs need it

        check_plan(model, config.tensor, plan.degrees.tensor)
    return _partition(config, model, plan)


def _partition(config: Config, model: nn.Module, plan: LayoutPlan) -> StagePartition | None:
    if plan.degrees.pipeline == 1:
        return None
    from paceline.parallel.pipeline.stage_partition import partition_model  # few runs need it

    return partition_model(model, config.pipeline, plan.degrees.pipeline)


def _resolve(
    plan: LayoutPlan, config: Config, model: nn.Module, world: World, optimizer: Optimizer | None
) -> LayoutPlan:
    """For the machine with the least memory."""
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
    from paceline.parallel.tensor.apply import check_plan

    allowed = []
    for degree in range(2, ranks + 1):
        with suppress(LayoutError):
            if ranks % degree == 0:
                check_plan(model, config.tensor, degree)
                allowed.append(degree)
    return allowed
