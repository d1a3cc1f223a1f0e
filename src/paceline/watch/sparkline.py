"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Each bar is the mean of consecutive values, on a scale from the lowest to the highest bar. `×` stands for values
    of which none is finite."""
    count = min(width, len(values))
    means = [_mean(values[len(values) * n // count : len(values) * (n + 1) // count]) for n in range(count)]
    finite = [mean for mean in means if mean is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_NOT_FINITE if mean is None else _BARS[_height(mean, low, high)] for mean in means)


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    # Divided first: the sum of large values may be infinite.
    return sum(value / len(finite) for value in finite) if finite else None


def _height(value: float, low: float, high: float) -> int:
    span = high / 2 - low / 2  # halved, as the difference of large values may be infinite
    return round((len(_BARS) - 1) * ((value / 2 - low / 2) / span)) if span > 0 else 0
