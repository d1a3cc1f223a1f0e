"""Applies the passes of a layout, in the order defined and explained in `plan/passes.py`.

Each pass is a function of another module, independent of the other passes. The `PassContext` provides what belongs to
other layers: dtypes, the context of the forward, the module that computes the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.models.spec import find_blocks
from paceline.models.weights import convert_weights
from paceline.parallel.compile import ShortBatches, compile_model, require_compiler
from paceline.parallel.data_parallel import CommHook, DataParallel, gpus, replicate
from paceline.parallel.dynamic_ddp import DynamicDDP
from paceline.parallel.fsdp import reduce_unused, shard, without_all_reduce
from paceline.parallel.meta_init import is_meta, materialize
from paceline.parallel.pipeline.schedule_runner import PipelineRunner, Stage, build_stages
from paceline.parallel.pipeline.stage_partition import AbsentLayer, StagePartition, partition_model, remove_other_stages
from paceline.parallel.recompute import recompute
from paceline.parallel.shards import broadcast_weights
from paceline.parallel.split import MicroBatched, MultiContext, spans_devices, split
from paceline.parallel.sync_batchnorm import convert_sync_batchnorm, synchronize_instance_norms, unconverted
from paceline.parallel.tensor.apply import apply_tensor_parallel
from paceline.plan.network_model import Traffic
from paceline.plan.passes import Pass, is_sharded, passes_for
from paceline.runtime.mesh import Mesh
from paceline.runtime.method_check import Departures
from paceline.text import plural

ForwardContext = AbstractContextManager[Any]
NoSync = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class PassContext:
    """Input of the passes."""

    config: Config
    mesh: Mesh
    log: Log
    convert: Callable[[nn.Module], None]  # casts the parameters to the dtype they are trained in
    autocast: Callable[[torch.device], ForwardContext | None]  # the context of a forward on that device
    gather_dtype: torch.dtype | None  # dtype in which FSDP2 gathers parameters; None: unchanged
    build_step: Callable[[ModelParts, ForwardContext | None], nn.Module]  # the module that computes the loss
    comm_hook: CommHook | None = None  # reduces the gradients of DDP
    traffic: Traffic | None = None  # counts the bytes that are sent in a step; None: they are not counted


@dataclass
class ModelParts:
    """The state that the passes modify."""

    model: nn.Module
    blocks: list[str] | None  # names of the blocks; None: detected
    autocast: Callable[[torch.device], ForwardContext | None] | None = None
    partition: StagePartition | None = None  # with a pipeline axis
    runner: PipelineRunner | None = None
    step: nn.Module | None = None  # None until the passes on the model have run
    forward: Callable[[Any], Any] | None = None  # the step with its wrappers
    no_sync: NoSync | None = None
    slices: bool = False  # whether `forward` computes a batch in slices


@dataclass(frozen=True)
class Wrapped:
    """The result: how to run a step."""

    forward: Callable[[Any], Any]
    no_sync: NoSync | None = None
    slices: bool = False


def parallelize(subject: ModelParts, context: PassContext) -> Wrapped:
    """Apply the passes on the model, build the step, and apply the passes on the step."""
    passes = passes_for(context.config, context.mesh.degrees)
    _execute([each for each in passes if each.target == "model"], subject, context)
    subject.step = _build_step(subject, context)
    # Without hooks on the step, calling forward directly skips the overhead of Module.__call__.
    subject.forward = subject.step.forward
    _execute([each for each in passes if each.target == "step"], subject, context)
    return Wrapped(subject.forward, subject.no_sync, subject.slices)


def change_recompute(subject: ModelParts, context: PassContext) -> None:
    """Switch a composed model to the `recompute` of the config."""
    context.log.info(_recompute(subject, context))
    if context.config.compile:
        torch.compiler.reset()  # compiled graphs contain the previous setting
        context.log.info(_compile(subject, context))


def _execute(passes: list[Pass], subject: ModelParts, context: PassContext) -> None:
    for each in passes:
        line = APPLY[each.name](subject, context)
        if line is not None:
            context.log.info(line)


def _build_step(subject: ModelParts, context: PassContext) -> nn.Module:
    forward_context = _forward_context(subject, context.mesh.device)
    if context.config.compile:
        forward_context = MultiContext([ShortBatches(), forward_context])
    if subject.partition is not None:
        rank = context.mesh.coords["pipeline"]
        stages = build_stages(subject.model, subject.partition, rank, forward_context)
        subject.runner = PipelineRunner(stages, subject.partition, context.mesh, context.config.pipeline)
    return context.build_step(subject, forward_context)


def _forward_context(subject: ModelParts, device: torch.device) -> ForwardContext | None:
    """The context of the forward, for each type of device that holds parameters."""
    if subject.autocast is None:
        return None
    if not spans_devices(subject.model):
        return subject.autocast(device)
    types = dict.fromkeys(parameter.device.type for parameter in subject.model.parameters())
    return MultiContext([subject.autocast(torch.device(each)) for each in types])


def _precision(subject: ModelParts, context: PassContext) -> None:
    context.convert(subject.model)
    subject.autocast = context.autocast


def _place(subject: ModelParts, context: PassContext) -> str | None:
    device = context.mesh.device
    if is_meta(subject.model):
        materialize(subject.model, subject.model, device, context.config.seed)
    if spans_devices(subject.model):
        return _ALREADY_PLACED
    subject.model.to(device)
    return None


def _split(subject: ModelParts, context: PassContext) -> str:
    if is_meta(subject.model):
        materialize(subject.model, subject.model, torch.device("cpu"), context.config.seed)
    if spans_devices(subject.model):
        return _ALREADY_PLACED
    return split(subject.model, context.config.split, subject.blocks)


_ALREADY_PLACED = "placement: unchanged, the model is already on several devices"


def _broadcast(subject: ModelParts, context: PassContext) -> None:
    broadcast_weights(subject.model, context.mesh.device)


def _channels_last(subject: ModelParts, context: PassContext) -> str:
    if is_sharded(context.config, context.mesh.degrees):
        return "channels_last: images only, because FSDP2 gathers contiguous parameters"
    return f"channels_last: images and {plural(convert_weights(subject.model), 'parameter')}"


def _pipeline(subject: ModelParts, context: PassContext) -> str:
    """Partition the model and remove the stages of other ranks."""
    model, config, mesh = subject.model, context.config, context.mesh
    partition = partition_model(model, config.pipeline, mesh.degrees.pipeline)
    blocks = [name for name, _ in find_blocks(model, subject.blocks)]
    remove_other_stages(model, partition, mesh.coords["pipeline"])
    here = {name for name, module in model.named_modules() if not isinstance(module, AbsentLayer)}
    # Blocks must be found before: on this rank, the list of layers may have a single member left.
    subject.blocks = [name for name in blocks if name in here] if blocks else None
    subject.partition = partition
    if not is_meta(model) and mesh.data_ranks == mesh.local_replicas and not config.fsdp.offload:
        model.to(mesh.device)  # otherwise FSDP moves it, block by block
    return f"pipeline: {len(partition.stages)} stages, layers: {partition}"


def _sync_batchnorm(subject: ModelParts, context: PassContext) -> str | None:
    changed = convert_sync_batchnorm(subject.model, context.mesh.data_group, context.traffic)
    changed += synchronize_instance_norms(subject.model, context.mesh.data_group)
    others = unconverted(subject.model)
    if others:
        context.log.warning(
            f"sync_batchnorm: {', '.join(others[:4])} not converted: custom forward; statistics stay per rank"
        )
    if not changed:
        return None
    ranks = "the ranks of a replica" if context.mesh.local_replicas > 1 else "all ranks"
    return f"sync_batchnorm: {plural(len(changed), 'layer')}, statistics over {ranks}"


def _tensor(subject: ModelParts, context: PassContext) -> str:
    return apply_tensor_parallel(subject.model, context.mesh, context.config.tensor)


def _recompute(subject: ModelParts, context: PassContext) -> str:
    return recompute(subject.model, context.config.recompute, subject.blocks, context.log.warning)


def _compile(subject: ModelParts, context: PassContext) -> str:
    if subject.model._compiled_call_impl is None:
        require_compiler(context.mesh.device)
    return compile_model(subject.model, context.config.compile, subject.blocks)


def _fsdp(subject: ModelParts, context: PassContext) -> str | None:
    assert subject.step is not None
    config, mesh, line = context.config, context.mesh, None
    if subject.runner is not None:
        roots = _shard_stages(subject.runner.stages, context)
    else:
        blocks = [block for _, block in find_blocks(subject.model, subject.blocks)]
        roots = [cast(FSDPModule, subject.step)]
        if config.unused_parameters == "allow":
            if config.blocks is None and blocks and mesh.degrees.world > 1:
                blocks, line = [], _GATHERED_AT_ONCE
            shard(subject.step, blocks, mesh, config.fsdp, context.gather_dtype)
            reduce_unused(roots[0])
        else:
            shard(subject.step, blocks, mesh, config.fsdp, context.gather_dtype)
    subject.forward = subject.step
    if mesh.degrees.replicate > mesh.local_replicas:
        subject.no_sync = partial(without_all_reduce, roots)
    return line


_GATHERED_AT_ONCE = (
    'fsdp: the full model is gathered at once, because ranks may run different modules (unused_parameters="allow"); '
    "set blocks to gather by block, if every rank runs every block"
)


def _shard_stages(stages: list[Stage], context: PassContext) -> list[FSDPModule]:
    """Shard each stage separately, as the schedule runs them separately. Parameters stay gathered over all
    micro-batches of a step."""
    settings = context.config.fsdp.model_copy(update={"reshard": False})
    for stage in stages:
        blocks = [block for block in stage.blocks if any(True for _ in block.parameters())]
        shard(stage, blocks, context.mesh, settings, context.gather_dtype)
    return [cast(FSDPModule, stage) for stage in stages]


def _ddp(subject: ModelParts, context: PassContext) -> None:
    assert subject.step is not None
    config, mesh = context.config, context.mesh
    build = partial(
        replicate,
        subject.step,
        mesh.device,
        config.ddp,
        allow_unused=config.unused_parameters == "allow",
        hook=context.comm_hook,
    )
    size = None if config.ddp.bucket_mb == "auto" else config.ddp.bucket_mb
    if size is None and config.sync is not None and config.sync.compress == "powersgd":
        # No small first bucket: its factors are sent in no time, but each bucket waits twice for the slowest rank.
        size = 25.0
    replicas = DynamicDDP(subject.step, build, context.log, Departures(config.timeout), size, context.comm_hook)
    replicas.traffic = context.traffic
    subject.forward, subject.no_sync = replicas, replicas.no_sync


def _data_parallel(subject: ModelParts, context: PassContext) -> str:
    assert subject.step is not None
    found = gpus()
    if len(found) > 1:
        subject.forward, subject.slices = DataParallel(subject.step, found), True
        return f'dp: one process, {len(found)} GPUs; strategy="ddp" with `paceline launch` is faster'
    count = "one GPU" if found else "no GPU"
    return f'dp: {count}, running on {context.mesh.device}; for several ranks: paceline launch -n 2, strategy="ddp"'


def _microbatches(subject: ModelParts, context: PassContext) -> None:
    subject.forward, subject.slices = MicroBatched(subject.step, context.config.split.microbatches), True


def _materialize(subject: ModelParts, context: PassContext) -> None:
    assert subject.step is not None
    if is_meta(subject.model):
        device = torch.device("cpu") if context.config.fsdp.offload else context.mesh.device
        materialize(subject.step, subject.model, device, context.config.seed)


def _tied_parameters(subject: ModelParts, context: PassContext) -> None:
    assert subject.runner is not None
    subject.runner.broadcast_tied(subject.model.get_parameter)


# The passes of `plan/passes.py`, by name. Each returns a line to log, or None.
APPLY: Mapping[str, Callable[[ModelParts, PassContext], str | None]] = {
    "precision": _precision,
    "placement": _place,
    "split": _split,
    "broadcast": _broadcast,
    "channels_last": _channels_last,
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
