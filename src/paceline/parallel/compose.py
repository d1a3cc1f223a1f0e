"""The parallelisms in their order (`plan/layout.py` has it, with the reasons). None of them knows another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.config.recipe import Config
from paceline.models.blocks import find_blocks
from paceline.parallel.compile import compile_model, require_compiler
from paceline.parallel.data_parallel import DataParallel, gpus
from paceline.parallel.ddp import replicate
from paceline.parallel.fsdp import reduce_unused, shard, without_all_reduce
from paceline.parallel.pipeline.stage import Stage
from paceline.parallel.recompute import recompute
from paceline.parallel.split import MicroBatched, is_spread, split
from paceline.parallel.tensor.apply import apply_tensor_parallel
from paceline.runtime.mesh import Mesh


@dataclass(frozen=True)
class Wrapped:
    """How a step is run, once the layout stands around it."""

    forward: Callable[[Any], Any]
    no_sync: Callable[[], AbstractContextManager[None]] | None = None


def place(model: nn.Module, device: torch.device, config: Config) -> str | None:
    """The whole model on its device, or its layers on theirs; says where they went, if on several."""
    if is_spread(model):
        return "model: its layers lie on several devices already, and stay there"
    if config.strategy == "split":
        return split(model, config.split, config.blocks)
    model.to(device)
    return None


def change(model: nn.Module, mesh: Mesh, config: Config) -> list[str]:
    """What is done to the model itself: tensor, recompute, compile. Returns a line on each for the reader."""
    said = [_data_parallel(mesh.device)] if config.strategy == "dp" else []
    if mesh.degrees.tensor > 1:
        said.append(apply_tensor_parallel(model, mesh, config.tensor))
    if config.recompute != "off":
        said.append(recompute(model, config.recompute, config.blocks))
    if config.compile:
        require_compiler(mesh.device)
        said.append(compile_model(model, config.compile, config.blocks))
    return said


def recompute_from_now(model: nn.Module, config: Config) -> list[str]:
    """What `change` did, again, for another kind of recomputation."""
    said = [recompute(model, config.recompute, config.blocks)]
    if config.compile:
        torch.compiler.reset()  # what was compiled holds the old kind
        said.append(compile_model(model, config.compile, config.blocks))
    return said


def _data_parallel(device: torch.device) -> str:
    found = gpus()
    if len(found) > 1:
        return f"dp: one process, {len(found)} GPUs; `paceline launch` with strategy: ddp is faster"
    return (
        f"dp: {'one GPU' if found else 'no GPU'}, so the model runs on {device} as it is; for several, "
        "each with its own Python: paceline launch -n 2 with strategy: ddp"
    )


def wrap(step: nn.Module, mesh: Mesh, config: Config, gather_dtype: torch.dtype | None) -> Wrapped:
    """What goes around the step: shard or replicate. One rank needs neither."""
    degrees = mesh.degrees
    if degrees.pipeline > 1:
        stages = [part for part in step.modules() if isinstance(part, Stage)]
        return Wrapped(step, _wrap_stages(stages, mesh, config, gather_dtype))
    if degrees.shard > 1 or config.fsdp.offload or (degrees.replicate > 1 and not degrees.is_replicated):
        model = cast(nn.Module, getattr(step, "model", step))
        shard(step, [block for _, block in find_blocks(model, config.blocks)], mesh, config.fsdp, gather_dtype)
        if config.unused_parameters == "allow":
            reduce_unused(cast(FSDPModule, step))
        several = degrees.replicate > 1
        return Wrapped(step, partial(without_all_reduce, cast(FSDPModule, step)) if several else None)
    if config.strategy == "dp" and len(gpus()) > 1:
        return Wrapped(DataParallel(step, gpus()))
    if config.strategy == "split" and config.split.microbatches > 1:
        return Wrapped(MicroBatched(step, config.split.microbatches))
    if degrees.replicate == 1:
        # Nobody hooks into the step, so one rank need not go through torch's machinery for hooks.
        return Wrapped(step.forward)
    allow_unused = config.unused_parameters == "allow"
    ddp = replicate(step, degrees.replicate, mesh.device, config.ddp, allow_unused=allow_unused)
    return Wrapped(ddp, ddp.no_sync)  # type: ignore[arg-type]


def _wrap_stages(
    stages: list[Stage], mesh: Mesh, config: Config, gather_dtype: torch.dtype | None
) -> Callable[[], AbstractContextManager[None]] | None:
    """Each stage is sharded on its own, as a schedule runs it on its own. Its weights stay gathered from its first
    micro-batch to the last, rather than being gathered for each."""
    if mesh.data_ranks == 1 and not config.fsdp.offload:
        return None
    settings = config.fsdp.model_copy(update={"reshard": False})
    for stage in stages:
        blocks = [block for block in stage.blocks if any(True for _ in block.parameters())]
        shard(stage, blocks, mesh, settings, gather_dtype)
    return partial(_without_all_reduce, stages) if mesh.degrees.replicate > 1 else None


@contextmanager
def _without_all_reduce(stages: list[Stage]) -> Iterator[None]:
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(without_all_reduce(cast(FSDPModule, stage)))
        yield
