"""Curves with a bounded number of points."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.watch.metric_series import MetricSeries
from paceline.watch.thinning import histogram, thin, thin_points

VALUES = st.floats(allow_nan=True, allow_infinity=False, width=32)


def series(values: list[float]) -> MetricSeries:
    return MetricSeries(array("q", range(1, len(values) + 1)), array("d", values))


def test_a_short_curve_is_left_as_it_is() -> None:
    assert thin(series([1.0, math.nan, 3.0]), 0, 99, buckets=2) == {"x": [1, 2, 3], "y": [1.0, None, 3.0]}


def test_a_spike_in_a_long_curve_stays_visible() -> None:
    values = [1.0] * 100_000
    values[70_123], values[3] = 99.0, -5.0
    curve = thin(series(values), 0, 1 << 53, buckets=500)
    assert len(curve["x"]) == 500 and max(filter(None, curve["hi"])) == 99.0 and min(filter(None, curve["lo"])) == -5.0
    assert (curve["x"][0], curve["y"][0], curve["x"][-1], curve["y"][-1]) == (1, 1.0, 100_000, 1.0)
    where = curve["hi"].index(99.0)
    assert abs((curve["x"][where] or 0) - 70_124) <= 200


@given(st.lists(VALUES, min_size=21, max_size=300))
def test_every_value_lies_within_the_bounds_of_its_bucket(values: list[float]) -> None:
    curve = thin_points(list(range(len(values))), values, buckets=10)
    finite = [value for value in values if math.isfinite(value)]
    assert len(curve["x"]) <= 10 and all(before < after for before, after in pairwise(curve["x"]))  # type: ignore
    lows, highs = ([value for value in curve[name] if value is not None] for name in ("lo", "hi"))
    if finite:
        assert math.isclose(min(lows), min(finite), rel_tol=1e-5) and math.isclose(
            max(highs), max(finite), rel_tol=1e-5
        )
    for mean, low, high in zip(curve["y"], curve["lo"], curve["hi"], strict=True):
        assert mean is None or low <= mean * (1 + 1e-5) + 1e-30 or low <= mean + abs(mean) * 1e-5  # type: ignore
        assert (mean is None) == (low is None) == (high is None)


def test_a_range_has_a_point_on_each_side() -> None:
    assert thin(series([float(n) for n in range(1, 101)]), 40, 42, buckets=50)["x"] == [39, 40, 41, 42, 43]


def test_large_values_do_not_overflow() -> None:
    curve = thin_points(range(100), [1e308] * 100, buckets=5)
    assert curve["y"] == [1e308] * 5


def test_a_histogram_counts_every_value() -> None:
    found = histogram([0.1] * 500 + [0.2] * 499 + [60.0], bins=10)
    assert found is not None and sum(found["counts"]) == 1000 and found["most"] == 60.0 and found["p50"] in (0.1, 0.2)
    assert found["low"] + 10 * found["width"] < 1, "a single slow step hides the others"
    assert histogram([1.0], bins=10) is None and histogram([math.nan] * 5, bins=10) is None
    same = histogram([2.0] * 50, bins=4)
    assert same is not None and sum(same["counts"]) == 50


def test_where_values_are_not_finite_is_kept() -> None:
    values = [1.0] * 20_000
    values[12_345] = math.nan
    assert thin(series(values), 0, 1 << 53, buckets=100)["bad"] == [12_346]
