"""A differentiable gather of different numbers of rows, for losses across the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import WorldError
from paceline.runtime import collectives
from paceline.runtime.collectives import Group


def all_gather_rows(tensor: Tensor, group: Group = None) -> Tensor:
    """Concatenate the tensors of all ranks along the first dim, in rank order.

    Ranks may have different numbers of rows, also none. The gradient of a row is summed over ranks, and goes back to
    the rank that the row came from. If every rank computes the same loss from all rows, this sum is the world size
    times its gradient, which the average over data ranks cancels. Collective, and so is its backward.

    Args:
        tensor: with at least one dim; dims after the first, and the dtype, are the same on every rank
        group: a process group of torch.distributed; default: all ranks

    Returns:
        The rows of all ranks.

    Raises:
        WorldError: `world.not-a-tensor`, `world.different-collectives`

    Example:
        >>> features = torch.ones(dist.rank() + 1, 3)
        >>> len(dist.all_gather_rows(features)) == sum(range(1, dist.world() + 1))
        True
    """
    if not tensor.dim():
        raise WorldError(
            "not-a-tensor",
            "all_gather_rows() got a tensor without dims.",
            fix="pass a tensor with rows along its first dim, e.g. tensor.reshape(1)",
        )
    kinds = collectives.all_gather_object([list(tensor.shape), str(tensor.dtype)], group)
    if len({(tuple(shape[1:]), dtype) for shape, dtype in kinds}) > 1:
        raise WorldError(
            "different-collectives",
            f"all_gather_rows() got tensors of shape and dtype {', '.join(f'{tuple(s)} {d}' for s, d in kinds)}.",
            why="only the first dim may differ between ranks",
            fix="pad the other dims to one size, and convert to one dtype",
        )
    if len(kinds) == 1:
        return tensor
    rows: Tensor = _Gather.apply(tensor, [shape[0] for shape, _ in kinds], _index(group), group)
    return rows


def _index(group: Group) -> int:
    """The place of this rank in a group."""
    return collectives.rank() if group is None else torch.distributed.get_rank(group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, counts: list[int], index: int, group: Group) -> Tensor:
        context.start, context.count, context.group = sum(counts[:index]), counts[index], group
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: counts[index]] = tensor
        received = [torch.empty_like(padded) for _ in counts]
        collectives.all_gather(received, padded, group)
        return torch.cat([rows[:count] for rows, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = gradients[0].contiguous().clone()
        collectives.all_reduce(total, group=context.group)
        return total[context.start : context.start + context.count], None, None, None
