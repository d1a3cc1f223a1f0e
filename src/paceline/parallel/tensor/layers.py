"""The forward of tensor-parallel layers, on local shards of the parameters as plain tensors, and the
differentiable collectives over the tensor axis that it uses.

| function                  | forward                              | backward                              |
|---------------------------|--------------------------------------|---------------------------------------|
| `copy_to_group`           | identity                             | all-reduce of the gradients           |
| `reduce_from_group`       | all-reduce                           | identity                              |
| `gather_from_group`       | all-gather along a dim               | each rank's slice of the gradient     |
| `all_gather_sequence`     | all-gather along the tokens          | reduce-scatter of the gradients       |
| `reduce_scatter_sequence` | reduce-scatter along the tokens      | all-gather of the gradients           |

They call torch.distributed directly. DTensor adds Python overhead to every call, and its all-gather crashes the process
with gloo on a GPU (torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.errors import LayoutError
from paceline.runtime import sample_keys
from paceline.runtime.collective_calls import all_gather_single, reduce_scatter_single

Run = Callable[..., Tensor]  # the original forward of a layer, on local shards
Group = Any
CommOp = Callable[[Tensor, int, Group], Tensor]  # takes a tensor, the sharded dim and the group


def _identity(values: Tensor, dim: int, group: Group) -> Tensor:
    return values.view_as(values)


def _all_reduce(partial: Tensor, dim: int, group: Group) -> Tensor:
    total = partial.contiguous().clone()
    torch_dist.all_reduce(total, group=group)
    return total


def _all_gather(shard: Tensor, dim: int, group: Group) -> Tensor:
    ranks = torch_dist.get_world_size(group)
    stacked = shard.new_empty((ranks * shard.shape[0], *shard.shape[1:]))
    all_gather_single(stacked, shard.contiguous(), group=group)
    return stacked if dim == 0 else torch.cat(stacked.chunk(ranks), dim)


def _reduce_scatter(full: Tensor, dim: int, group: Group) -> Tensor:
    ranks = torch_dist.get_world_size(group)
    stacked = torch.cat(full.chunk(ranks, dim)) if dim else full.contiguous()
    shard = full.new_empty((stacked.shape[0] // ranks, *stacked.shape[1:]))
    reduce_scatter_single(shard, stacked, group=group)
    return shard


def _scatter(full: Tensor, dim: int, group: Group) -> Tensor:
    """The slice of this rank; no communication."""
    return full.chunk(torch_dist.get_world_size(group), dim)[torch_dist.get_rank(group)].contiguous()


class _CommFunction(torch.autograd.Function):
    """Runs one operation in the forward and its conjugate in the backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, op: CommOp, conjugate: CommOp, dim: int, group: Group) -> Tensor:
        ctx.op, ctx.conjugate, ctx.dim, ctx.group = op, conjugate, dim, group
        return op(values, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            result = _CommFunction.apply(gradient, ctx.conjugate, ctx.op, ctx.dim, ctx.group)
        else:
            result = ctx.conjugate(gradient, ctx.dim, ctx.group)
        return result, None, None, None, None


def copy_to_group(values: Tensor, group: Group) -> Tensor:
    """For replicated values that each rank uses differently."""
    result: Tensor = _CommFunction.apply(values, _identity, _all_reduce, 0, group)
    return result


def reduce_from_group(partial: Tensor, group: Group) -> Tensor:
    result: Tensor = _CommFunction.apply(partial, _all_reduce, _identity, 0, group)
    return result


def gather_from_group(shard: Tensor, dim: int, group: Group) -> Tensor:
    """For results that all ranks use in the same way."""
    result: Tensor = _CommFunction.apply(shard, _all_gather, _scatter, dim, group)
    return result


def all_gather_sequence(shard: Tensor, dim: int, group: Group) -> Tensor:
    """For results that each rank uses differently."""
    result: Tensor = _CommFunction.apply(shard, _all_gather, _reduce_scatter, dim, group)
    return result


def reduce_scatter_sequence(partial: Tensor, dim: int, group: Group) -> Tensor:
    result: Tensor = _CommFunction.apply(partial, _reduce_scatter, _all_gather, dim, group)
    return result


def _mark(kind: str | None, axis: DeviceMesh, width: int = 0) -> None:
    """Note how the activations that follow are sharded: dropout needs the coordinates of this rank's elements."""
    keys = sample_keys.active.keys
    if keys is not None:
        keys.shard = None if kind is None else (kind, axis.get_local_rank(), width)


def parallelize_layer(module: nn.Module, style: str, axis: DeviceMesh, sequence_parallel: bool) -> None:
    """Replace the forward of the module by one that runs on local shards."""
    run = partial(_run, module, module.forward, axis)
    forward: Callable[..., Any]
    if style in ("column", "gathered") or (style == "vocabulary" and isinstance(module, nn.Linear)):
        forward = partial(_column, run, axis, style, sequence_parallel)
    elif style == "row":
        forward = partial(_row, module, run, axis, sequence_parallel)
    elif style == "vocabulary" and isinstance(module, nn.Embedding):
        forward = partial(_vocabulary_embedding, module, run, axis, sequence_parallel)
    elif style == "sequence" and sequence_parallel and isinstance(module, nn.Embedding):
        forward = partial(_sequence_embedding, run, axis, set(module._parameters))
    else:
        sums = style == "summed" or (style == "sequence" and sequence_parallel)
        forward = partial(run, summed=set(module._parameters) if sums else ())
        if sums and style == "sequence":
            forward = partial(_sequence, forward, axis)
    module.forward = wraps(module.forward)(forward)


def _run(
    module: nn.Module,
    forward: Callable[..., Any],
    axis: DeviceMesh,
    *inputs: Any,
    summed: Collection[str] = (),
    overrides: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Run the original forward with local shards in place of the parameters.

    Entries in `__dict__` shadow `_parameters`, in which FSDP stores the gathered parameters.
    """
    attributes = module.__dict__
    local = {
        key: _local_shard(parameter, axis, key in summed)
        for key, parameter in module._parameters.items()
        if parameter is not None
    } | dict(overrides or {})
    previous = {key: attributes[key] for key in local if key in attributes}
    attributes.update(local)
    try:
        return forward(*inputs, **options)
    finally:
        for key in local:
            del attributes[key]
        attributes.update(previous)


def _local_shard(parameter: Tensor, axis: DeviceMesh, summed: bool = False) -> Tensor:
    """The local shard, differentiable. `summed`: ranks use it on different inputs, so gradients are all-reduced."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local(grad_placements=parameter.placements)
    return copy_to_group(local, axis.get_group()) if summed else local


def _sequence(run: Run, axis: DeviceMesh, *inputs: Any, **options: Any) -> Any:
    outputs = run(*inputs, **options)
    _mark("tokens", axis)
    return outputs


def _column(run: Run, axis: DeviceMesh, style: str, sequence_parallel: bool, inputs: Tensor) -> Tensor:
    group = axis.get_group()
    if sequence_parallel:
        inputs = all_gather_sequence(inputs, _token_dim(inputs), group)
    else:
        inputs = copy_to_group(inputs, group)
    local = run(inputs)
    _mark("features" if style != "gathered" else None, axis, local.shape[-1])
    if style == "vocabulary":
        return DTensor.from_local(local, axis, [Shard(local.dim() - 1)], run_check=False)
    return local if style == "column" else gather_from_group(local, local.dim() - 1, group)


def _row(module: nn.Module, run: Run, axis: DeviceMesh, sequence_parallel: bool, inputs: Tensor) -> Tensor:
    """The bias is added once, after the reduction."""
    total = _reduce(run(inputs, overrides={"bias": None}), axis, sequence_parallel)
    bias = module._parameters["bias"]
    return total if bias is None else total + _local_shard(bias, axis, summed=sequence_parallel).to(total.dtype)


def _vocabulary_embedding(
    module: nn.Embedding, run: Run, axis: DeviceMesh, sequence_parallel: bool, tokens: Tensor
) -> Tensor:
    """Tokens outside the local shard yield zeros, which the reduction fills in."""
    rows = module.num_embeddings // axis.size()
    first = axis.get_local_rank() * rows
    local = tokens - first
    outside = (local < 0) | (local >= rows)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + rows else None
    values = run(local.masked_fill(outside, 0), overrides={"padding_idx": padding})
    return _reduce(values.masked_fill(outside[..., None], 0.0), axis, sequence_parallel)


def _sequence_embedding(run: Run, axis: DeviceMesh, parameters: Collection[str], tokens: Tensor) -> Tensor:
    """Look up the local slice of tokens; every rank has all of them."""
    _require_even(tokens.shape[-1], axis)
    _mark("tokens", axis)
    return run(tokens.chunk(axis.size(), -1)[axis.get_local_rank()], summed=parameters)


def _reduce(local: Tensor, axis: DeviceMesh, sequence_parallel: bool) -> Tensor:
    """All-reduce, or reduce-scatter over tokens with sequence parallelism."""
    _mark("tokens" if sequence_parallel else None, axis)
    if not sequence_parallel:
        return reduce_from_group(local, axis.get_group())
    dim = _token_dim(local)
    _require_even(local.shape[dim], axis)
    return reduce_scatter_sequence(local, dim, axis.get_group())


def _token_dim(hidden: Tensor) -> int:
    """For shapes (…, tokens, width)."""
    return hidden.dim() - 2


def _require_even(tokens: int, axis: DeviceMesh) -> None:
    if tokens % axis.size():
        raise LayoutError(
            "tokens-not-divisible", f"The sequence length {tokens} is not divisible by the tensor degree {axis.size()}."
        )
