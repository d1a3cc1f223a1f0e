"""Curves with a bounded number of points: the lowest, the highest and the mean value in each interval of steps.

    thin(series, 1, 1_000_000, buckets=1500)   # {"x": […], "y": […], "lo": […], "hi": […]}

A spike in a million steps stays visible in `lo` or `hi`. Where each interval has a single point, `y` is all there is.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice
from typing import Any

from paceline.watch.metric_series import MetricSeries

Curve = dict[str, list[float | None]]
DIGITS, TIME_DIGITS = 6, 14  # significant ones; times are seconds since 1970


def thin(series: MetricSeries, low: int, high: int, buckets: int, digits: int = DIGITS) -> Curve:
    """The values of the steps from `low` to `high`, with the last one before and the first one after them, so that a
    line can be drawn to the edges."""
    first = max(0, bisect_left(series.steps, low) - 1)
    last = min(len(series), bisect_right(series.steps, high) + 1)
    return thin_points(series.steps[first:last], series.values[first:last], buckets, digits)


def thin_points(positions: Sequence[float], values: Sequence[float], buckets: int, digits: int = DIGITS) -> Curve:
    """`positions` are in increasing order. `bad` are those of values that are not finite, one for each bucket."""
    if len(positions) <= 2 * buckets:
        return {"x": list(positions), "y": [rounded(value, digits) for value in values]}
    # The first and the last point stay as they are.
    begin, width, last = positions[0], (positions[-1] - positions[0]) / (buckets - 2), len(positions) - 1
    edges = [max(1, bisect_left(positions, begin + n * width, hi=last)) for n in range(1, buckets - 2)]
    curve: Curve = {"x": [], "y": [], "lo": [], "hi": [], "bad": []}
    start = 0
    for end in (1, *edges, last, last + 1):
        if end > start:
            _add_bucket(curve, positions[start:end], values[start:end], digits)
        start = end
    return curve


def _add_bucket(curve: Curve, positions: Sequence[float], values: Sequence[float], digits: int) -> None:
    curve["x"].append(positions[len(positions) // 2])
    mean = sum(values) / len(values)
    if not math.isfinite(mean):  # some are nan; or the sum of large values overflows
        bad = (position for position, value in zip(positions, values, strict=True) if not math.isfinite(value))
        curve["bad"].extend(islice(bad, 1))
        values = [value for value in values if math.isfinite(value)]
        mean = sum(value / len(values) for value in values) if values else math.nan
    curve["y"].append(rounded(mean, digits))
    curve["lo"].append(rounded(min(values, default=math.nan), digits))
    curve["hi"].append(rounded(max(values, default=math.nan), digits))


def rounded(value: float, digits: int = DIGITS) -> float | None:
    """With as many digits as a screen can show; JSON has no nan."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def histogram(values: Sequence[float], bins: int) -> dict[str, Any] | None:
    """Counts of values in intervals of equal width, from the 0.5th to the 99.5th percentile: a single slow step must
    not hide the others. What lies outside is counted in the first and the last interval."""
    known = sorted(value for value in values if math.isfinite(value))
    if len(known) < 2:
        return None
    low, high = known[len(known) // 200], known[-1 - len(known) // 200]
    width = (high - low) / bins or max(abs(low), 1e-9) * 1e-3
    edges = [bisect_left(known, low + n * width) for n in range(1, bins)]
    counts = [after - before for before, after in zip([0, *edges], [*edges, len(known)], strict=True)]
    middle = known[len(known) // 2]
    percentiles = {"p50": middle, "p99": known[min(len(known) - 1, len(known) * 99 // 100)]}
    return {"low": low, "width": width, "counts": counts, "least": known[0], "most": known[-1], **percentiles}
