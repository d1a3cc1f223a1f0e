"""What passes between the ranks of the tensor axis, in the forward and, the other way round, in the backward.

| function         | forward                                  | backward                                  |
|------------------|------------------------------------------|-------------------------------------------|
| `spread`         | the same values on each rank             | their gradients are added up              |
| `add_up`         | the ranks' values are added up           | the same gradient for each rank           |
| `gather`         | the ranks' shares are put together       | the gradients of whole ones are cut       |
| `gather_spread`  | the ranks' shares are put together       | added up, and each rank gets its share    |
| `add_up_shares`  | added up, and each rank gets its share   | the gradients of shares are put together  |

torch's collectives directly, and not DTensor's: those run in Python at every call, and over gloo on a GPU (torch 2.11)
a gather of theirs ends the process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

Group = Any

# torch 2.13 has new names for these, and warns about the old ones.
_all_gather = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


def _sum(own: Tensor, group: Group) -> Tensor:
    total = own.contiguous().clone()
    torch_dist.all_reduce(total, group=group)
    return total


def _put_together(share: Tensor, dim: int, group: Group) -> Tensor:
    ranks = torch_dist.get_world_size(group)
    stacked = share.new_empty((ranks * share.shape[0], *share.shape[1:]))
    _all_gather(stacked, share.contiguous(), group=group)
    return stacked if dim == 0 else torch.cat(stacked.chunk(ranks), dim)


def _sum_of_shares(whole: Tensor, dim: int, group: Group) -> Tensor:
    ranks = torch_dist.get_world_size(group)
    stacked = torch.cat(whole.chunk(ranks, dim)) if dim else whole.contiguous()
    share = whole.new_empty((stacked.shape[0] // ranks, *stacked.shape[1:]))
    _reduce_scatter(share, stacked, group=group)
    return share


def _own_share(whole: Tensor, dim: int, group: Group) -> Tensor:
    return whole.chunk(torch_dist.get_world_size(group), dim)[torch_dist.get_rank(group)].contiguous()


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, same: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return same.view_as(same)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group) -> Tensor:
        return _sum(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _put_together(share, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _own_share(gradient, ctx.dim, ctx.group), None, None


class _GatherSpread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _put_together(share, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum_of_shares(gradient, ctx.dim, ctx.group), None, None


class _AddUpShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _sum_of_shares(own, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _put_together(gradient, ctx.dim, ctx.group), None, None


def spread(same: Tensor, group: Group) -> Tensor:
    """Equal values, which each rank uses in its own way."""
    result: Tensor = _Spread.apply(same, group)
    return result


def add_up(own: Tensor, group: Group) -> Tensor:
    result: Tensor = _AddUp.apply(own, group)
    return result


def gather(share: Tensor, dim: int, group: Group) -> Tensor:
    """Whole values, which all ranks use in the same way."""
    result: Tensor = _Gather.apply(share, dim, group)
    return result


def gather_spread(share: Tensor, dim: int, group: Group) -> Tensor:
    """Whole values, which each rank uses in its own way."""
    result: Tensor = _GatherSpread.apply(share, dim, group)
    return result


def add_up_shares(own: Tensor, dim: int, group: Group) -> Tensor:
    result: Tensor = _AddUpShares.apply(own, dim, group)
    return result
