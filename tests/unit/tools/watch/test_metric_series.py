"""Metrics of runs as numbers by step."""

from __future__ import annotations

import math
import time
from array import array
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from paceline.run.folder import RunFolder
from paceline.tools.watch.metric_series import MetricSeries, histogram, read_metrics, thin, thin_points
from watched import STEPS, evaluation, run_folder, step


def test_the_metrics_of_a_run(tmp_path: Path) -> None:
    records = [*STEPS, evaluation(5, loss=3.0, accuracy=0.5), evaluation(10, loss=4.0, accuracy=0.7, time=1.0)]
    metrics = read_metrics(run_folder(tmp_path, records))
    assert list(metrics["loss"].steps) == list(range(1, 11)) and metrics["loss"].last == 0.2
    assert metrics["loss"].at(0) is None and metrics["loss"].at(99) == 0.2
    assert metrics.step == 10 and metrics.epoch == 0 and metrics.speed == (1000.0, "samples/s")
    assert metrics.median_speed == 750.0 and metrics.problems == []
    assert metrics.evaluations["loss"].best("loss") == (5, 3.0)
    assert metrics.evaluations["accuracy"].best("accuracy") == (10, 0.7) and set(metrics.evaluations) == {
        "loss",
        "accuracy",
    }


def test_steps_that_a_resumed_run_trains_again_are_replaced(tmp_path: Path) -> None:
    metrics = read_metrics(run_folder(tmp_path, [step(1), step(2), step(3), step(2, loss=9.0), step(4, loss=8.0)]))
    assert list(metrics["loss"].steps) == [1, 2, 4] and list(metrics["loss"].values) == [2.0, 9.0, 8.0]


def test_the_mark_of_losses_of_one_rank_is_no_metric(tmp_path: Path) -> None:
    metrics = read_metrics(run_folder(tmp_path, [step(1), {**step(2), "of_rank": 0}]))
    assert len(metrics["loss"]) == 2 and "of_rank" not in metrics.series


def test_rounding_for_the_page_does_not_change_the_digits_that_are_shown() -> None:
    series = MetricSeries()
    series.append(1, 0.12441514059901237)  # six digits are 0.124415, whose five digits are 0.12441 in JavaScript
    (value,) = thin(series, 1, 1, 10)["y"]
    assert f"{value:.5g}" == f"{series.last:.5g}" == "0.12442"


def test_values_of_other_types_are_nan(tmp_path: Path) -> None:
    odd = [None, "1", True, [1], {}, 10**400, math.inf]
    metrics = read_metrics(run_folder(tmp_path, [step(n + 1, loss=value) for n, value in enumerate(odd)]))
    assert len(metrics["loss"]) == 7 and all(map(math.isnan, metrics["loss"].values))
    assert metrics["loss"].best("loss") is None


def test_records_without_a_step_are_counted(tmp_path: Path) -> None:
    odd = [{"loss": 1.0}, step(1), {"step": "2"}, {"step": -1}, {"step": 2**64}, {"step": True}, [1], "x"]
    metrics = read_metrics(run_folder(tmp_path, odd))
    assert len(metrics["loss"]) == 1 and metrics.problems == ["7 unreadable lines in metrics.jsonl"]


def test_missing_and_strange_files(tmp_path: Path) -> None:
    assert read_metrics(RunFolder(tmp_path)).problems == ["metrics.jsonl is missing: no metrics"]
    (tmp_path / "metrics.jsonl").mkdir()
    assert "is a folder" in read_metrics(RunFolder(tmp_path)).problems[0]


def test_speed_in_steps_without_samples(tmp_path: Path) -> None:
    records = [step(n, time=100.0 + n / 4) for n in range(1, 4)]
    assert read_metrics(run_folder(tmp_path, records)).speed == (4.0, "steps/s")


def test_the_number_of_metrics_is_limited(tmp_path: Path) -> None:
    metrics = read_metrics(run_folder(tmp_path, [evaluation(n, **{f"m{n}": 1.0}) for n in range(100)]))
    assert len(metrics.evaluations) == 20


def test_skipped_steps_are_counted(tmp_path: Path) -> None:
    assert read_metrics(run_folder(tmp_path, [step(1), step(2, skipped=True)])).skipped_steps == 1


def test_a_long_file_is_read_quickly(tmp_path: Path) -> None:
    """A million lines take about three seconds; here it is a tenth of that, on a machine that may be busy."""
    folder = run_folder(tmp_path, [])
    folder.metrics.write_text(
        "".join(f'{{"step": {n}, "epoch": 0, "loss": {n}.5, "lr": 0.1}}\n' for n in range(100_000))
    )
    began = time.process_time()
    metrics = read_metrics(folder)
    assert len(metrics["loss"]) == 100_000 and time.process_time() - began < 3


def test_an_empty_series() -> None:
    assert (MetricSeries().first, MetricSeries().last, MetricSeries().at(1), MetricSeries().best("loss")) == (
        None,
        None,
        None,
        None,
    )


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
