"""Metrics of a run for other tools, written afterwards."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.monitor.conversion import convert
from paceline.run.folder import RunFolder
from watched import STEPS, evaluation, run_folder


def test_csv(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [*STEPS, {"no": "step"}, evaluation(10, loss=3.0)])
    path = convert(run, "csv", tmp_path / "elsewhere")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert path == tmp_path / "elsewhere" / "metrics.csv" and [row["step"] for row in rows] == [
        *map(str, range(1, 11)),
        "10",
    ]
    assert rows[-1]["eval/loss"] == "3.0" and float(rows[4]["loss"]) == 0.4 and rows[4]["samples_per_second"] == "500.0"


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_folder(tmp_path / "run", [*STEPS, evaluation(10, loss=3.0)])
    events = EventAccumulator(str(convert(run, "tensorboard", None)))
    events.Reload()
    assert [each.step for each in events.Scalars("train/loss")] == list(range(1, 11))
    assert events.Scalars("eval/loss")[0].value == 3.0


def test_what_the_run_wrote_is_not_overwritten(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    convert(run, "csv", None)
    with pytest.raises(CheckpointError, match=r"checkpoint\.exists"):
        convert(run, "csv", None)
    with pytest.raises(CheckpointError, match=r"checkpoint\.no-metrics"):
        convert(RunFolder(tmp_path), "csv", None)
