"""A loss is a sum and a weight.

The gradient of a step is Σsum / Σweight over all ranks and micro-batches, so it does not depend on how the batch is
sliced. A model may return a plain mean, which is weighted by the number of samples; if samples have different weights
(padding tokens), it returns a `Loss`.

`cross_entropy` also supports logits sharded over the vocabulary (a DTensor, the output of a `vocabulary` head). Full
rows are never gathered: ranks exchange the maximum, the sum of exponentials and the target logit of each row, and
compute the gradient of their own shard.

`WeightedSums` and `weighted_means` make means over batches and ranks of such pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional

from paceline.runtime import collectives

IGNORE_INDEX = -100  # the default of torch


class Loss(NamedTuple):
    """The sum of a loss, and the weight to divide it by.

    The gradient of a step is Σsum / Σweight over all ranks and micro-batches. Return it where samples have different
    weights, such as sequences with padding; a plain mean is weighted by the number of samples.

    Args:
        sum: the sum of the losses of this micro-batch, with its graph
        weight: the number of samples or tokens in it

    Example:
        >>> import torch
        >>> import paceline
        >>> losses, mask = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 0.0])
        >>> paceline.Loss(sum=(losses * mask).sum(), weight=mask.sum())
        Loss(sum=tensor(3.), weight=tensor(2.))
    """

    sum: Tensor
    weight: Tensor | float


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = IGNORE_INDEX, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy over the last dim of `logits`. `reduction` is "mean" or "sum" over targets not equal to
    `ignore_index`."""
    flat_targets = targets.flatten()
    if not isinstance(logits, DTensor):
        return functional.cross_entropy(
            logits.flatten(0, -2), flat_targets, ignore_index=ignore_index, reduction=reduction
        )
    axis = logits.device_mesh
    local = logits.to_local().flatten(0, -2)
    if local.dtype in (torch.bfloat16, torch.float16):  # as autocast does
        local = local.float()
    counted = flat_targets != ignore_index
    first = axis.get_local_rank() * local.shape[-1]
    losses: Tensor = _VocabParallelCrossEntropy.apply(local, flat_targets - first, counted, axis.get_group())
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


class WeightedSums:
    """Σ value × weight and Σ weight by name, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, total: Any, weight: Any) -> None:
        parts = [
            torch.as_tensor(part, dtype=torch.float64, device=self._device).reshape(()) for part in (total, weight)
        ]
        # At weight zero (a batch of padding only) the sum may be 0/0.
        pair = torch.stack([torch.where(parts[1] == 0, 0.0, parts[0]), parts[1]])
        self._sums[name] = pair if name not in self._sums else self._sums[name] + pair

    def totals(self) -> dict[str, list[float]]:
        return {name: pair.tolist() for name, pair in self._sums.items()}


def weighted_means(local: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return means over all ranks by name, from this rank's (Σ value × weight, Σ weight). Names may differ by rank.

    Collective: must be called on every rank.
    """
    return means_of(collectives.all_gather_object({name: list(pair) for name, pair in local.items()}))


def means_of(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Means by name, from the (Σ value × weight, Σ weight) of all ranks."""
    total: dict[str, list[float]] = {}
    for pairs in ranks:
        for name, (value, weight) in pairs.items():
            sums = total.setdefault(name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + value, sums[1] + weight
    return {name: value / weight if weight else math.nan for name, (value, weight) in total.items()}


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """The loss of each row. `targets` are relative to the first local column; those of other ranks are out of range."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, targets: Tensor, counted: Tensor, group: Any) -> Tensor:
        maximum = local.amax(-1)
        torch_dist.all_reduce(maximum, torch_dist.ReduceOp.MAX, group=group)
        shifted = local - maximum[:, None]
        is_local = counted & (targets >= 0) & (targets < local.shape[-1])
        columns = torch.where(is_local, targets, 0)
        target_logits = torch.where(is_local, shifted.gather(-1, columns[:, None])[:, 0], 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), target_logits])
        torch_dist.all_reduce(sums, group=group)
        total, target_logits = sums
        ctx.save_for_backward(exponentials.div_(total[:, None]), columns, is_local, counted)
        return torch.where(counted, total.log() - target_logits, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, columns, is_local, counted = ctx.saved_tensors
        grad_logits = probabilities.clone()
        grad_logits.scatter_add_(-1, columns[:, None], -is_local.to(grad_logits.dtype)[:, None])
        return grad_logits.mul_(torch.where(counted, gradient, 0.0)[:, None]), None, None, None
