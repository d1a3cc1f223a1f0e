"""Executes the passes of a layout, in the order of `plan/passes.py`, which also has the reasons for it.

Each pass is one function of another module, and none of them knows another. What belongs to a higher layer or to a
sibling (dtypes, the forward's context, the module that computes the loss) is passed in with the `Composition`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.models.blocks import find_blocks
from paceline.parallel.compile import compile_model, require_compiler
from paceline.parallel.data_parallel import DataParallel, gpus
from paceline.parallel.ddp import replicate
from paceline.parallel.fsdp import reduce_unused, shard, without_all_reduce
from paceline.parallel.meta_init import is_meta, materialize
from paceline.parallel.pipeline.schedule_runner import PipelineRunner
from paceline.parallel.pipeline.stage import Stage, build_stages
from paceline.parallel.pipeline.stage_partition import StagePartition, partition_model, remove_other_stages
from paceline.parallel.recompute import recompute
from paceline.parallel.shards import broadcast_weights
from paceline.parallel.split import MicroBatched, MultiContext, spans_devices, split
from paceline.parallel.sync_batchnorm import convert_sync_batchnorm, left_alone
from paceline.parallel.tensor.apply import apply_tensor_parallel
from paceline.plan.passes import Pass, passes_for
from paceline.runtime.mesh import Mesh

ForwardContext = AbstractContextManager[Any]
NoSync = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Composition:
    """What the passes of one run need to know."""

    config: Config
    mesh: Mesh
    log: Log
    convert: Callable[[nn.Module], None]  # a module's weights, to the dtype in which they are trained
    autocast: Callable[[torch.device], ForwardContext | None]  # what a forward on that device runs in
    gather_dtype: torch.dtype | None  # in which FSDP2 gathers weights; None: as they are
    build_step: Callable[[Subject, ForwardContext | None], nn.Module]  # the module that computes a batch's loss


@dataclass
class Subject:
    """What the passes change."""

    model: nn.Module
    blocks: list[str] | None  # names of the blocks, where they are not found by themselves
    autocast: Callable[[torch.device], ForwardContext | None] | None = None
    partition: StagePartition | None = None  # of a pipeline
    runner: PipelineRunner | None = None
    step: nn.Module | None = None  # None until the passes on the model are done
    forward: Callable[[Any], Any] | None = None  # the step, with what is wrapped around it
    no_sync: NoSync | None = None


@dataclass(frozen=True)
class Wrapped:
    """How a step is run, once the layout stands around it."""

    forward: Callable[[Any], Any]
    no_sync: NoSync | None = None


def compose(subject: Subject, context: Composition) -> Wrapped:
    """Execute the passes on the model, build the step around it, and execute the passes on the step."""
    passes = passes_for(context.config, context.mesh.degrees)
    _execute([each for each in passes if each.target == "model"], subject, context)
    subject.step = _build_step(subject, context)
    # Unless something hooks into the step, it need not go through torch's machinery for hooks.
    subject.forward = subject.step.forward
    _execute([each for each in passes if each.target == "step"], subject, context)
    return Wrapped(subject.forward, subject.no_sync)


def recompute_from_now(subject: Subject, context: Composition) -> None:
    """Change the kind of recomputation of a composed model to that of the config."""
    context.log.info(recompute(subject.model, context.config.recompute, subject.blocks))
    if context.config.compile:
        torch.compiler.reset()  # what was compiled holds the old kind
        context.log.info(_compile(subject, context))


def _execute(passes: list[Pass], subject: Subject, context: Composition) -> None:
    for each in passes:
        line = APPLY[each.name](subject, context)
        if line is not None:
            context.log.info(line)


def _build_step(subject: Subject, context: Composition) -> nn.Module:
    forward_context = _forward_context(subject, context.mesh.device)
    if subject.partition is not None:
        rank = context.mesh.coords["pipeline"]
        stages = build_stages(subject.model, subject.partition, rank, forward_context)
        subject.runner = PipelineRunner(stages, subject.partition, context.mesh, context.config.pipeline)
    return context.build_step(subject, forward_context)


def _forward_context(subject: Subject, device: torch.device) -> ForwardContext | None:
    """What the model computes within, for each kind of device that it is on."""
    if subject.autocast is None:
        return None
    if not spans_devices(subject.model):
        return subject.autocast(device)
    kinds = dict.fromkeys(parameter.device.type for parameter in subject.model.parameters())
    return MultiContext([subject.autocast(torch.device(kind)) for kind in kinds])


def _precision(subject: Subject, context: Composition) -> None:
    context.convert(subject.model)
    subject.autocast = context.autocast


def _place(subject: Subject, context: Composition) -> str | None:
    device = context.mesh.device
    if is_meta(subject.model):
        materialize(subject.model, subject.model, device, context.config.seed)
    if spans_devices(subject.model):
        return _ALREADY_SPREAD
    subject.model.to(device)
    return None


def _split(subject: Subject, context: Composition) -> str:
    if is_meta(subject.model):
        materialize(subject.model, subject.model, torch.device("cpu"), context.config.seed)
    if spans_devices(subject.model):
        return _ALREADY_SPREAD
    return split(subject.model, context.config.split, subject.blocks)


_ALREADY_SPREAD = "model: its layers lie on several devices already, and stay there"


def _broadcast(subject: Subject, context: Composition) -> None:
    broadcast_weights(subject.model, context.mesh.device)


def _pipeline(subject: Subject, context: Composition) -> str:
    """Partition the model and leave only this rank's stages in it."""
    model, config, mesh = subject.model, context.config, context.mesh
    partition = partition_model(model, config.pipeline, mesh.degrees.pipeline)
    blocks = [name for name, _ in find_blocks(model, subject.blocks)]
    remove_other_stages(model, partition, mesh.coords["pipeline"])
    here = dict(model.named_modules())
    # What was a list of like layers may be a single one on this rank, which later passes would not find.
    subject.blocks = [name for name in blocks if name in here] if blocks else None
    subject.partition = partition
    if not is_meta(model) and mesh.data_ranks == 1 and not config.fsdp.offload:
        model.to(mesh.device)  # else sharding moves it, block by block
    return f"pipeline: {len(partition.stages)} stages, layers: {partition}"


def _sync_batchnorm(subject: Subject, context: Composition) -> str | None:
    changed = convert_sync_batchnorm(subject.model, context.mesh.data_group)
    others = left_alone(subject.model)
    if others:
        context.log.warning(
            f"{', '.join(others[:4])}: a batch norm with a forward of its own counts each rank's samples only"
        )
    if not changed:
        return None
    return f"batch norm: {len(changed)} layers count the samples of all ranks (sync_batchnorm)"


def _tensor(subject: Subject, context: Composition) -> str:
    return apply_tensor_parallel(subject.model, context.mesh, context.config.tensor)


def _recompute(subject: Subject, context: Composition) -> str:
    return recompute(subject.model, context.config.recompute, subject.blocks)


def _compile(subject: Subject, context: Composition) -> str:
    require_compiler(context.mesh.device)
    return compile_model(subject.model, context.config.compile, subject.blocks)


def _fsdp(subject: Subject, context: Composition) -> None:
    assert subject.step is not None
    config, mesh = context.config, context.mesh
    if subject.runner is not None:
        roots = _shard_stages(subject.runner.stages, context)
    else:
        blocks = [block for _, block in find_blocks(subject.model, subject.blocks)]
        shard(subject.step, blocks, mesh, config.fsdp, context.gather_dtype)
        roots = [cast(FSDPModule, subject.step)]
        if config.unused_parameters == "allow":
            reduce_unused(roots[0])
    subject.forward = subject.step
    if mesh.degrees.replicate > 1:
        subject.no_sync = partial(_without_all_reduce, roots)


def _shard_stages(stages: list[Stage], context: Composition) -> list[FSDPModule]:
    """Each stage is sharded on its own, as a schedule runs it on its own. Its weights stay gathered from its first
    micro-batch to the last, rather than being gathered for each."""
    settings = context.config.fsdp.model_copy(update={"reshard": False})
    for stage in stages:
        blocks = [block for block in stage.blocks if any(True for _ in block.parameters())]
        shard(stage, blocks, context.mesh, settings, context.gather_dtype)
    return [cast(FSDPModule, stage) for stage in stages]


@contextmanager
def _without_all_reduce(roots: list[FSDPModule]) -> Iterator[None]:
    with ExitStack() as stack:
        for root in roots:
            stack.enter_context(without_all_reduce(root))
        yield


def _ddp(subject: Subject, context: Composition) -> None:
    assert subject.step is not None
    config, mesh = context.config, context.mesh
    allow_unused = config.unused_parameters == "allow"
    ddp = replicate(subject.step, mesh.degrees.replicate, mesh.device, config.ddp, allow_unused=allow_unused)
    subject.forward, subject.no_sync = ddp, cast(NoSync, ddp.no_sync)


def _data_parallel(subject: Subject, context: Composition) -> str:
    assert subject.step is not None
    found = gpus()
    if len(found) > 1:
        subject.forward = DataParallel(subject.step, found)
        return f"dp: one process, {len(found)} GPUs; `paceline launch` with strategy: ddp is faster"
    return (
        f"dp: {'one GPU' if found else 'no GPU'}, so the model runs on {context.mesh.device} as it is; for several, "
        "each with its own Python: paceline launch -n 2 with strategy: ddp"
    )


def _microbatches(subject: Subject, context: Composition) -> None:
    subject.forward = MicroBatched(subject.step, context.config.split.microbatches)


def _materialize(subject: Subject, context: Composition) -> None:
    assert subject.step is not None
    if is_meta(subject.model):
        device = torch.device("cpu") if context.config.fsdp.offload else context.mesh.device
        materialize(subject.step, subject.model, device, context.config.seed)


def _tied_parameters(subject: Subject, context: Composition) -> None:
    assert subject.runner is not None
    subject.runner.broadcast_tied(subject.model.get_parameter)


# The passes of `plan/passes.py`, by name. Each returns a line for the reader, or None.
APPLY: Mapping[str, Callable[[Subject, Composition], str | None]] = {
    "precision": _precision,
    "placement": _place,
    "split": _split,
    "broadcast": _broadcast,
    "pipeline": _pipeline,
    "sync_batchnorm": _sync_batchnorm,
    "tensor": _tensor,
    "recompute": _recompute,
    "compile": _compile,
    "fsdp": _fsdp,
    "ddp": _ddp,
    "data_parallel": _data_parallel,
    "microbatches": _microbatches,
    "materialize": _materialize,
    "tied_parameters": _tied_parameters,
}
