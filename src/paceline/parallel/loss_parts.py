"""Combines the losses of slices into the loss of a batch: means are weighted by what they were divided by or by their
number of samples, sums by the weight that the model returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.models.divisor import Divisor
from paceline.models.loss_module import changed_kind

LossPart = tuple[Tensor, Tensor | float | Divisor | None]  # (mean, None), (mean, divisor) or (sum, weight)


def combine_losses(parts: Sequence[LossPart], samples: Sequence[int]) -> LossPart:
    """`samples` holds the number of samples of each slice; all values are on one device."""
    means = [weight is None or isinstance(weight, Divisor) for _, weight in parts]
    if any(means) and not all(means):
        raise changed_kind(sums=True)
    if parts[0][1] is None:
        total = sum(samples)
        shares = [value * (count / total) for (value, _), count in zip(parts, samples, strict=True)]
        return torch.stack(shares).sum(), None
    if isinstance(parts[0][1], Divisor):
        dtype = parts[0][0].dtype  # a quotient of integers would be rounded to float32
        counts = [torch.as_tensor(part[1].weight, dtype=dtype) for part in parts if isinstance(part[1], Divisor)]
        sums = [torch.where(count > 0, mean, 0.0) * count for (mean, _), count in zip(parts, counts, strict=True)]
        count = torch.stack(counts).sum()
        return torch.stack(sums).sum() / torch.where(count > 0, count, 1.0), Divisor(count)
    weight: Any = sum(weight for _, weight in parts if weight is not None)
    return torch.stack([value for value, _ in parts]).sum(), weight


def combine_metrics(parts: Sequence[Mapping[str, Any] | None], weights: Sequence[Any]) -> dict[str, Any] | None:
    """The weighted mean of each metric."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    total = sum(weights)
    return {
        name: sum(part[name] * weight for part, weight in zip(found, weights, strict=True)) / total for name in found[0]
    }
