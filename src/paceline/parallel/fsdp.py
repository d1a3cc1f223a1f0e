"""Sharding: weights, gradients and optimizer state are sharded over ranks, and gathered block by block (torch's FSDP2).

| FSDP1's name   | here                                             |
|----------------|--------------------------------------------------|
| FULL_SHARD     | `strategy: fsdp`                                 |
| SHARD_GRAD_OP  | `strategy: fsdp` with `fsdp: {reshard: false}`   |
| HYBRID_SHARD   | `strategy: hsdp`, or `layout: {replicate, shard}` |
| NO_SHARD       | `strategy: ddp`                                  |

Beside a tensor or pipeline axis FSDP2 also replicates, with shards of degree 1: DDP does not take DTensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from paceline.config.sections import FsdpSection
from paceline.errors import LayoutError
from paceline.runtime.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    settings: FsdpSection,
    gather_dtype: torch.dtype | None = None,
) -> None:
    """Shard the parameters of `root`, in place: each block's together, then what is left.

    `gather_dtype` is the precision's own dtype, in which weights are gathered; gradients are summed in float32. Neither
    inputs nor outputs are cast: what a layer computes in is autocast's affair, in this layout as in all others.
    """
    if settings.offload:
        require_gpu(mesh.device)
    _require_dims(root)
    several = mesh.degrees.replicate > 1
    param = DTYPES[settings.param_dtype] if settings.param_dtype else gather_dtype
    reduce = DTYPES[settings.reduce_dtype] if settings.reduce_dtype else (torch.float32 if param else None)
    options: dict[str, Any] = {
        "mesh": mesh.axes("replicate", "shard") if several else mesh.axes("shard"),
        "offload_policy": CPUOffloadPolicy() if settings.offload else OffloadPolicy(),
    }
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=False)
    output = DTYPES[settings.output_dtype] if settings.output_dtype else None
    of_blocks = MixedPrecisionPolicy(
        param_dtype=param, reduce_dtype=reduce, output_dtype=output, cast_forward_inputs=False
    )
    # Shards of degree 1 are full already: resharding would only copy.
    reshard = settings.reshard and mesh.degrees.shard > 1
    _cast_buffers(root, settings)
    sharded: list[FSDPModule] = [
        fully_shard(block, reshard_after_forward=reshard, mp_policy=of_blocks, **options)
        for block in _self_contained(root, blocks)
    ]
    fully_shard(root, reshard_after_forward=False, mp_policy=policy, **options)
    if settings.prefetch > 1:  # one is torch's own way
        _prefetch(sharded, settings.prefetch)
    _guard(root)


def _require_dims(root: nn.Module) -> None:
    scalars = [name.removeprefix("model.") for name, parameter in root.named_parameters() if not parameter.dim()]
    if scalars:
        raise LayoutError(
            "scalar-parameter",
            f"{', '.join(scalars[:4])}: a parameter without dimensions can't be cut over ranks.",
            why="torch cuts parameters along their first dimension",
            fix="give it one element instead: nn.Parameter(torch.ones(1)); or use strategy: ddp",
        )


def _self_contained(root: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Blocks that share no parameter with the rest: one that is shared has to be gathered and reduced by the root."""
    uses = Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))
    within = [Counter(id(parameter) for _, parameter in b.named_parameters(remove_duplicate=False)) for b in blocks]
    return [block for block, own in zip(blocks, within, strict=True) if all(uses[key] == own[key] for key in own)]


def _guard(root: nn.Module) -> None:
    """The model's weights are gathered only while `root` runs: called by itself it would fail somewhere inside."""
    model = getattr(root, "model", None)
    if not isinstance(model, nn.Module) or model._compiled_call_impl is not None:
        return
    running = [False]

    def begin(module: nn.Module, inputs: Any) -> None:
        running[0] = True

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        running[0] = False

    def require_running(module: nn.Module, inputs: Any) -> None:
        if not running[0]:
            raise LayoutError(
                "called-by-itself",
                f"The model {type(module).__name__} was called by itself, but its weights are cut over ranks.",
                why="all ranks have to come together to gather them, which the Trainer's own calls see to",
                fix="call trainer.predict(data) or trainer.evaluate(data) on all ranks; in a loop of your own "
                "trainer.forward(batch); or take the whole weights from trainer.state_dict() on rank 0",
            )

    root.register_forward_pre_hook(begin)
    root.register_forward_hook(end, always_call=True)
    model.register_forward_pre_hook(require_running)


def require_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise LayoutError(
            "offload-needs-gpu",
            f"fsdp.offload is set, but this rank computes on {device}.",
            why="offloading moves what a GPU has no room for into the CPU's memory; here it is there already",
            fix="leave fsdp.offload out",
        )


def _cast_buffers(root: nn.Module, settings: FsdpSection) -> None:
    if settings.buffer_dtype is None:
        return
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(DTYPES[settings.buffer_dtype])


def _prefetch(blocks: list[FSDPModule], depth: int) -> None:
    """Gather the weights of the next `depth` blocks while this one computes: more memory, less waiting."""
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - depth) : number][::-1])


@contextmanager
def without_all_reduce(root: FSDPModule) -> Iterator[None]:
    """Backwards in here do not all-reduce over replicas: the last one of a step reduces their sum."""
    root.set_requires_all_reduce(False)
    try:
        yield
    finally:
        root.set_requires_all_reduce(True)


def reduce_unused(root: FSDPModule) -> None:
    """A parameter that this rank's loss does not use goes into the reduction as zeros: other ranks may use it."""
    if not hasattr(root, "set_reduce_scatter_unused_params"):
        raise LayoutError(
            "unused-needs-newer-torch",
            f"unused_parameters: allow is set, which FSDP2 of torch {torch.__version__} can't do.",
            why="ranks that use different parameters would reduce their gradients into each other",
            fix="update torch, freeze the unused parameters, or use strategy: ddp",
        )
    root.set_reduce_scatter_unused_params(True)


def discard_gradients(root: nn.Module) -> None:
    """Also what backwards under `without_all_reduce` have left, which torch keeps beside the gradients."""
    root.zero_grad(set_to_none=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group._partial_reduce_output = None


def reshard_all(root: nn.Module) -> None:
    """Only this rank's shards stay: a forward without a backward leaves the root's weights gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
