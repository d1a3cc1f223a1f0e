"""Differentiable collectives over the tensor axis.

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

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

Group = Any
CommOp = Callable[[Tensor, int, Group], Tensor]  # takes a tensor, the sharded dim and the group

# Renamed in torch 2.13; the old names are deprecated.
_all_gather_single = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter_single = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


def _identity(values: Tensor, dim: int, group: Group) -> Tensor:
    return values.view_as(values)


def _all_reduce(partial: Tensor, dim: int, group: Group) -> Tensor:
    total = partial.contiguous().clone()
    torch_dist.all_reduce(total, group=group)
    return total


def _all_gather(shard: Tensor, dim: int, group: Group) -> Tensor:
    ranks = torch_dist.get_world_size(group)
    stacked = shard.new_empty((ranks * shard.shape[0], *shard.shape[1:]))
    _all_gather_single(stacked, shard.contiguous(), group=group)
    return stacked if dim == 0 else torch.cat(stacked.chunk(ranks), dim)


def _reduce_scatter(full: Tensor, dim: int, group: Group) -> Tensor:
    ranks = torch_dist.get_world_size(group)
    stacked = torch.cat(full.chunk(ranks, dim)) if dim else full.contiguous()
    shard = full.new_empty((stacked.shape[0] // ranks, *stacked.shape[1:]))
    _reduce_scatter_single(shard, stacked, group=group)
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
