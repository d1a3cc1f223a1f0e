"""Metrics of runs as numbers by step."""

from __future__ import annotations

import math
import time
from pathlib import Path

from paceline.run.folder import RunFolder
from paceline.watch.metric_series import MetricSeries, read_metrics
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
