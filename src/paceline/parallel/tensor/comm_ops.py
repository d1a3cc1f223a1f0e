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

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

Group = Any
Way = Callable[[Tensor, int, Group], Tensor]  # of values, a dim that is cut, and the ranks

# torch 2.13 has new names for these, and warns about the old ones.
_all_gather = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
_reduce_scatter = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor


def _as_it_is(values: Tensor, dim: int, group: Group) -> Tensor:
    return values.view_as(values)


def _sum(own: Tensor, dim: int, group: Group) -> Tensor:
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


class _Exchange(torch.autograd.Function):
    """One way in the forward, another one back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Way, back: Way, dim: int, group: Group) -> Tensor:
        ctx.back, ctx.dim, ctx.group = back, dim, group
        return there(values, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradient, ctx.dim, ctx.group), None, None, None, None


def copy_to_group(same: Tensor, group: Group) -> Tensor:
    """Equal values, which each rank uses in its own way."""
    result: Tensor = _Exchange.apply(same, _as_it_is, _sum, 0, group)
    return result


def reduce_from_group(own: Tensor, group: Group) -> Tensor:
    result: Tensor = _Exchange.apply(own, _sum, _as_it_is, 0, group)
    return result


def gather_from_group(share: Tensor, dim: int, group: Group) -> Tensor:
    """Whole values, which all ranks use in the same way."""
    result: Tensor = _Exchange.apply(share, _put_together, _own_share, dim, group)
    return result


def all_gather_sequence(share: Tensor, dim: int, group: Group) -> Tensor:
    """Whole values, which each rank uses in its own way."""
    result: Tensor = _Exchange.apply(share, _put_together, _sum_of_shares, dim, group)
    return result


def reduce_scatter_sequence(own: Tensor, dim: int, group: Group) -> Tensor:
    result: Tensor = _Exchange.apply(own, _sum_of_shares, _put_together, dim, group)
    return result
