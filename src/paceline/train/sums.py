"""Weighted means over all ranks, by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline.runtime import collectives


def means_over_ranks(own: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """From this rank's (Σ value × weight, Σ weight) by name. Ranks may know different names, so they travel along."""
    total: dict[str, list[float]] = {}
    for rank in collectives.all_gather_object({name: list(pair) for name, pair in own.items()}):
        for name, (value, weight) in rank.items():
            before = total.setdefault(name, [0.0, 0.0])
            before[0], before[1] = before[0] + value, before[1] + weight
    return {name: value / weight if weight else math.nan for name, (value, weight) in total.items()}
