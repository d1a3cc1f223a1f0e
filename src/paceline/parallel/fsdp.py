"""Sharding of parameters, gradients and optimizer state across ranks, gathered block by block (torch's FSDP2).

| FSDP1          | paceline                                         |
|----------------|--------------------------------------------------|
| FULL_SHARD     | `strategy: fsdp`                                 |
| SHARD_GRAD_OP  | `strategy: fsdp` with `fsdp: {reshard: false}`   |
| HYBRID_SHARD   | `strategy: hsdp`, or `layout: {replicate, shard}` |
| NO_SHARD       | `strategy: ddp`                                  |

With a tensor or pipeline axis, FSDP2 also does the replication (shard degree 1): DDP does not support DTensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from paceline.config.sections import FsdpSection
from paceline.errors import LayoutError, TrainError
from paceline.models.spec import find_blocks
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.precision import policies
from paceline.runtime.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GATHERED_AT_ONCE = (
    'fsdp: the full model is gathered at once, because ranks may run different modules (unused_parameters="allow"); '
    "set blocks to gather by block, if every rank runs every block"
)


def apply_fsdp(parts: ModelParts, context: PassContext) -> str | None:
    config, mesh, line = context.config, context.mesh, None
    gather_dtype = policies.half_dtype(config.precision)
    if parts.runner is not None:
        # Each stage separately, as the schedule runs them. Parameters stay gathered over all micro-batches of a step.
        settings = config.fsdp.model_copy(update={"reshard": False})
        for stage in parts.runner.stages:
            blocks = [block for block in stage.blocks if any(True for _ in block.parameters())]
            shard(stage, blocks, mesh, settings, gather_dtype)
        roots = [cast(FSDPModule, stage) for stage in parts.runner.stages]
    else:
        blocks = [block for _, block in find_blocks(parts.model, parts.blocks)]
        allows_unused = config.unused_parameters == "allow"
        if allows_unused and config.blocks is None and blocks and mesh.degrees.world > 1:
            blocks, line = [], _GATHERED_AT_ONCE
        shard(parts.module, blocks, mesh, config.fsdp, gather_dtype)
        roots = [cast(FSDPModule, parts.module)]
        if allows_unused:
            reduce_unused(roots[0])
    parts.forward = parts.module
    if mesh.degrees.replicate > mesh.local_replicas:
        parts.no_sync = partial(without_all_reduce, roots)
    return line


def shard(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    settings: FsdpSection,
    gather_dtype: torch.dtype | None = None,
) -> None:
    """Shard `root` in place: each block is a group, and the remaining parameters are another.

    Parameters are gathered in `gather_dtype`, and gradients are reduced in float32. Inputs and outputs are not cast:
    autocast determines the dtype of each operation, as in every other layout. Without autocast, `param_dtype` is the
    one of operations, and inputs of the model and its blocks are cast to it, as FSDP does by default.
    """
    if settings.offload:
        require_gpu(mesh.device)
    _require_shardable(root)
    for parameter in root.parameters():  # FSDP2 refuses other memory formats (channels_last, a transposed weight)
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    blocks = _self_contained(root, blocks)
    _require_one_dtype(root, blocks)
    axes = ("replicate", "shard") if mesh.degrees.replicate > mesh.local_replicas else ("shard",)
    param = DTYPES[settings.param_dtype] if settings.param_dtype else gather_dtype
    reduce = DTYPES[settings.reduce_dtype] if settings.reduce_dtype else (torch.float32 if param else None)
    options: dict[str, Any] = {
        "mesh": mesh.axes(*axes),
        "offload_policy": CPUOffloadPolicy() if settings.offload else OffloadPolicy(),
    }
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=False)
    output = DTYPES[settings.output_dtype] if settings.output_dtype else None
    casts = settings.param_dtype is not None and gather_dtype is None
    block_policy = replace(policy, output_dtype=output, cast_forward_inputs=casts)
    if casts:  # not those of the root: targets keep their dtype
        model = root.get_submodule("model") if hasattr(root, "model") else root
        model.register_forward_pre_hook(partial(_cast_inputs, param), prepend=True, with_kwargs=True)
    # With degree 1, shards are full tensors and resharding only copies.
    reshard = settings.reshard and mesh.degrees.shard > 1
    _cast_buffers(root, settings)
    sharded: list[FSDPModule] = [
        fully_shard(block, reshard_after_forward=reshard, mp_policy=block_policy, **options) for block in blocks
    ]
    fully_shard(root, reshard_after_forward=False, mp_policy=policy, **options)
    if settings.prefetch > 1:  # 1 is the default of torch
        _prefetch(sharded, settings.prefetch)
    _set_dtypes_of_frozen(root)
    running = _track_running(root)
    _keep_gathered(root, running)
    _guard(root, running)


def _cast_inputs(dtype: torch.dtype | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, (args, kwargs))


def _groups_in(root: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters: one for each sharded module that has some of its own."""
    found = [module._get_fsdp_state()._fsdp_param_group for module in root.modules() if isinstance(module, FSDPModule)]
    return [group for group in found if group is not None]


def _set_dtypes_of_frozen(root: nn.Module) -> None:
    """Groups without trainable parameters get no dtypes from FSDP2, and could not be unfrozen under mixed precision."""

    def complete(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        for group in _groups_in(root):
            if group._orig_dtype is None and group.fsdp_params:
                first = group.fsdp_params[0]
                group._orig_dtype, group._reduce_dtype = first.orig_dtype, first.reduce_dtype

    handle = root.register_forward_pre_hook(complete)  # after FSDP2's own, which sets the other dtypes


def _track_running(root: nn.Module) -> list[bool]:
    """A list whose only element tells whether the forward of `root` is running."""
    running = [False]

    def begin(module: nn.Module, inputs: Any) -> None:
        running[0] = True

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        running[0] = False

    root.register_forward_pre_hook(begin)
    root.register_forward_hook(end, always_call=True)
    return running


def _keep_gathered(root: nn.Module, running: list[bool]) -> None:
    """Support a backward inside the forward (autograd.grad, for a gradient penalty), which FSDP2 takes for that of the
    step: it frees nothing, and blocks stay gathered from then on, because a double backward runs no hooks that gather
    them. Gradients are reduced at the end of the step's backward: they may be complete only then."""
    double = [False]

    def post_backward(group: Any, original: Callable[..., None], *unused: Any) -> None:
        if running[0]:
            double[0], group.post_forward_mesh_info = True, None
        elif not double[0] or torch._C._current_autograd_node() is None:
            original(*unused)

    for group in _groups_in(root):
        group.post_backward = partial(post_backward, group, group.post_backward)


def _require_shardable(root: nn.Module) -> None:
    odd = [name.removeprefix("model.") for name, p in root.named_parameters() if not p.dim() or not p.numel()]
    if odd:
        raise LayoutError(
            "scalar-parameter",
            f"Parameters without a dim, or without elements, can't be sharded: {', '.join(odd[:4])}.",
        )


def _require_one_dtype(root: nn.Module, groups: Sequence[nn.Module]) -> None:
    """FSDP2 reduces the gradients of a group together."""
    inside = {id(parameter) for group in groups for parameter in group.parameters()}
    rest = [each for each in root.named_parameters() if id(each[1]) not in inside]
    for members in (rest, *(list(group.named_parameters()) for group in groups)):
        first = {p.dtype: name.removeprefix("model.") for name, p in reversed(members) if p.requires_grad}
        if len(first) > 1:
            found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
            raise LayoutError("mixed-dtypes", f"Parameters of one FSDP group have different dtypes: {found}.")


def _self_contained(root: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Blocks that share no parameter with other modules. The root gathers and reduces shared parameters."""
    uses = Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))
    within = [Counter(id(parameter) for _, parameter in b.named_parameters(remove_duplicate=False)) for b in blocks]
    return [block for block, own in zip(blocks, within, strict=True) if all(uses[key] == own[key] for key in own)]


def _guard(root: nn.Module, running: list[bool]) -> None:
    """Parameters are gathered only while `root` runs, so a direct call of the model would fail obscurely."""
    model = getattr(root, "model", None)
    if not isinstance(model, nn.Module) or model._compiled_call_impl is not None:
        return

    def require_running(module: nn.Module, inputs: Any) -> None:
        if not running[0]:
            raise LayoutError(
                "called-by-itself",
                f"{type(module).__name__} was called directly, but its parameters are sharded across ranks.",
            )

    model.register_forward_pre_hook(require_running)


def require_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise LayoutError("offload-needs-gpu", f"fsdp.offload needs a GPU, but this rank runs on {device}.")


def _cast_buffers(root: nn.Module, settings: FsdpSection) -> None:
    if settings.buffer_dtype is None:
        return
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(DTYPES[settings.buffer_dtype])


def _prefetch(blocks: list[FSDPModule], depth: int) -> None:
    """All-gather the next `depth` blocks while a block computes: uses more memory, hides more communication."""
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(0, number - depth) : number][::-1])


@contextmanager
def without_all_reduce(roots: Sequence[FSDPModule]) -> Iterator[None]:
    """Skip the all-reduce across replicas; the last backward of a step reduces the accumulated gradients."""
    for root in roots:
        root.set_requires_all_reduce(False)
    try:
        yield
    finally:
        for root in roots:
            root.set_requires_all_reduce(True)


def reduce_unused(root: FSDPModule) -> None:
    """Reduce unused parameters as zeros, because other ranks may use them."""
    if not hasattr(root, "set_reduce_scatter_unused_params"):
        raise LayoutError(
            "unused-needs-newer-torch",
            f'unused_parameters="allow" is not supported by FSDP2 in torch {torch.__version__}.',
        )
    root.set_reduce_scatter_unused_params(True)


def track_used(root: nn.Module) -> set[nn.Parameter]:
    """The sharded parameters whose gradient this rank has computed, added in each backward. `reduce_unused` makes
    gradients of others zero, which an optimizer with momentum or weight decay would apply."""
    used: set[nn.Parameter] = set()

    tracked: set[nn.Module] = set()
    handles: dict[nn.Module, RemovableHandle] = {}

    def track(module: nn.Module, inputs: Any) -> None:
        handles[module].remove()
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if module in tracked or group is None:  # the pre-flight puts removed hooks back
            return
        tracked.add(module)
        for each in group.fsdp_params:
            mark = partial(_mark, used, each.sharded_param)
            leaf, trains = each.unsharded_param, each.unsharded_param.requires_grad
            leaf.requires_grad_(True)  # a hook needs it; a frozen parameter may be unfrozen later
            leaf.register_post_accumulate_grad_hook(mark)
            leaf.requires_grad_(trains)

    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The parameters that collect gradients exist once a module was gathered, in FSDP2's own hook.
            handles[module] = module.register_forward_pre_hook(track)
    return used


def reduced_check(model: nn.Module) -> Callable[[], None]:
    """A function that raises if gradients of a step were not reduced: FSDP2 leaves a block gathered that a backward
    within a backward has computed again, in several forwards of one loss."""
    states = [(name, each._get_fsdp_state()) for name, each in model.named_modules() if isinstance(each, FSDPModule)]
    blocks = [(name, group) for name, state in states if (group := state._fsdp_param_group) is not None]

    def check() -> None:
        for name, group in blocks:
            if group.is_unsharded and any(each.unsharded_param.grad is not None for each in group.fsdp_params):
                raise TrainError("gradients-not-reduced", f"FSDP did not reduce the gradients of {name}.")

    return check


def unreached(root: nn.Module, loss: torch.Tensor) -> list[str]:
    """The trainable parameters that a loss does not depend on, while they are gathered."""
    nodes, leaves, seen = [loss.grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            nodes.extend(following for following, _ in node.next_functions)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    held = [each for group in _groups_in(root) for each in group.fsdp_params]
    missing = [each for each in held if each.sharded_param.requires_grad and id(each.unsharded_param) not in leaves]
    return [each._param_fqn or names[id(each.sharded_param)] for each in missing]


def _mark(used: set[nn.Parameter], parameter: nn.Parameter, unsharded: nn.Parameter) -> None:
    used.add(parameter)


def discard_gradients(root: nn.Module) -> None:
    """Also drop what backwards under `without_all_reduce` accumulated, which torch stores apart from `.grad`."""
    root.zero_grad(set_to_none=True)
    for group in _groups_in(root):
        group._partial_reduce_output = None


def reshard_all(root: nn.Module) -> None:
    """Free gathered parameters: after a forward without a backward, the root keeps them."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
