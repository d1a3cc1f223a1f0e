"""Weighted means over batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.runtime import collectives


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
