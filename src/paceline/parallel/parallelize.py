"""Applies the passes of a layout, in the order defined and explained in `plan/passes.py`.

Each pass is a function of another module, independent of the other passes: it changes the `ModelParts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.models.loss_module import LossModule
from paceline.models.spec import find_blocks
from paceline.parallel.compile import apply_compile, compile_model
from paceline.parallel.data_parallel import apply_data_parallel
from paceline.parallel.dynamic_ddp import apply_ddp
from paceline.parallel.fsdp import apply_fsdp
from paceline.parallel.meta_init import apply_materialize
from paceline.parallel.model_parts import Apply, ModelParts, PassContext
from paceline.parallel.optimizer_binding import names_of
from paceline.parallel.recompute import apply_recompute, recompute
from paceline.parallel.split import MultiContext, apply_microbatches, apply_split
from paceline.parallel.sync_batchnorm import apply_sync_batchnorm
from paceline.parallel.weight_passes import apply_broadcast, apply_channels_last, apply_placement, apply_precision
from paceline.plan.passes import passes_for


def _pipeline(parts: ModelParts, context: PassContext) -> str | None:
    from paceline.parallel.pipeline.stage_partition import apply_pipeline  # few runs need it

    return apply_pipeline(parts, context)


def _tensor(parts: ModelParts, context: PassContext) -> str | None:
    from paceline.parallel.tensor.apply import apply_tensor  # few runs need it

    return apply_tensor(parts, context)


def _tied_parameters(parts: ModelParts, context: PassContext) -> None:
    assert parts.runner is not None
    parts.runner.broadcast_tied(parts.model.get_parameter)


# The passes of `plan/passes.py`, by name.
APPLY: Mapping[str, Apply] = {
    "precision": apply_precision,
    "placement": apply_placement,
    "split": apply_split,
    "broadcast": apply_broadcast,
    "channels_last": apply_channels_last,
    "pipeline": _pipeline,
    "sync_batchnorm": apply_sync_batchnorm,
    "tensor": _tensor,
    "recompute": apply_recompute,
    "compile": apply_compile,
    "fsdp": apply_fsdp,
    "ddp": apply_ddp,
    "data_parallel": apply_data_parallel,
    "microbatches": apply_microbatches,
    "materialize": apply_materialize,
    "tied_parameters": _tied_parameters,
}


def parallelize(model: nn.Module, context: PassContext) -> ModelParts:
    """Apply the passes on the model, build the module that computes its loss, and apply the passes on the step."""
    names = [name for name, _ in find_blocks(model)]
    parts = ModelParts(model, context.stateful_loss, context.config.blocks, all_blocks=names)
    parts.names = names_of(parts.named_parameters())
    _apply("model", parts, context)
    parts.module = _build_loss_module(parts, context)
    parts.module.proportions.warn = context.log.warning
    # Without hooks on the module, calling forward directly skips the overhead of Module.__call__.
    parts.forward = parts.module.forward
    _apply("step", parts, context)
    return parts


def _apply(target: Literal["model", "step"], parts: ModelParts, context: PassContext) -> None:
    for each in passes_for(context.config, context.mesh.degrees):
        if each.target == target:
            line = APPLY[each.name](parts, context)
            if line is not None:
                context.log.info(line)


def _build_loss_module(parts: ModelParts, context: PassContext) -> LossModule:
    contexts = [made for make in parts.forward_contexts if (made := make()) is not None]
    around = MultiContext(contexts) if len(contexts) > 1 else next(iter(contexts), None)
    if context.partition is not None:
        from paceline.parallel.pipeline.pipeline_loss import build_pipeline

        return build_pipeline(parts, context.partition, context, around)
    return LossModule(parts.model, around, context.stateful_loss)


def change_recompute(parts: ModelParts, config: Config, log: Log) -> None:
    """Switch a parallelized model to the `recompute` of the config."""
    log.info(recompute(parts.model, config.recompute, parts.blocks, log.warning))
    if config.compile:
        torch.compiler.reset()  # compiled graphs contain the previous setting
        log.info(compile_model(parts.model, config.compile, parts.blocks))
