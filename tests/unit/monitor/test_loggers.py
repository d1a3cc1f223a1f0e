"""Each place is read back by its own reader."""

from __future__ import annotations

import csv
import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError, TrainError
from paceline.monitor import media
from paceline.monitor.loggers import convert, open_loggers
from paceline.run.folder import RunFolder
from watched import STEPS, evaluation, run_folder

RECORDS: list[dict[str, Any]] = [
    {"step": 1, "epoch": 0, "loss": 2.5, "lr": 0.1},
    {"step": 2, "epoch": 0, "loss": math.nan, "lr": 0.05, "note": "text is for people"},
    {"evaluation": True, "step": 2, "loss": 1.5, "accuracy": 0.25},
    {"step": 3, "epoch": 1, "loss": 1.25, "lr": 0.025, "time": 2000000000.5},
]
PIXELS = np.array([[[255, 0, 0], [0, 255, 0]]], np.uint8)
SETTINGS = {"run": "runs/small", "batch": 8, "optimizer": {"name": "adamw", "lr": 0.1}}


@pytest.fixture(autouse=True)
def no_calls_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def log(name: str, run: Path, *parts: list[dict[str, Any]], settings: dict[str, Any] = SETTINGS) -> None:
    for logger in open_loggers([name], RunFolder(run), settings):
        for part in parts:
            logger.write(part)
        logger.close()


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_holds_a_row_a_record_and_its_columns_grow(tmp_path: Path) -> None:
    log("csv", tmp_path, RECORDS[:1], RECORDS[1:3], RECORDS[3:])
    first, second, evaluation, third = rows(tmp_path)
    assert list(first) == ["step", "epoch", "loss", "lr", "note", "eval/loss", "eval/accuracy", "time"]
    assert (first["step"], float(first["loss"]), first["eval/loss"]) == ("1", 2.5, "")
    assert (second["note"], math.isnan(float(second["loss"]))) == ("text is for people", True)
    assert (evaluation["step"], evaluation["eval/accuracy"], evaluation["loss"]) == ("2", "0.25", "")
    assert (third["step"], float(third["loss"]), third["note"]) == ("3", 1.25, "")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_csv_continues_after_what_a_killed_run_left(tmp_path: Path) -> None:
    log("csv", tmp_path, RECORDS[:1])
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2,0")
    log("csv", tmp_path, RECORDS[2:])
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "2", "3"]
    assert float(rows(tmp_path)[3]["loss"]) == 1.25


def test_tensorboard_reads_training_and_evaluations_back(tmp_path: Path) -> None:
    log("tensorboard", tmp_path, RECORDS[:1], RECORDS[1:])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {"train/epoch", "train/loss", "train/lr", "eval/loss", "eval/accuracy"}
    losses = reader.Scalars("train/loss")
    assert [event.step for event in losses] == [1, 2, 3]
    assert (losses[0].value, math.isnan(losses[1].value), losses[2].value) == (2.5, True, 1.25)
    assert losses[2].wall_time == 2000000000.5
    assert [(event.step, event.value) for event in reader.Scalars("eval/accuracy")] == [(2, 0.25)]


@pytest.fixture
def offline_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    yield
    import wandb

    wandb.teardown()  # the service that it starts would live until Python ends


def wandb_records(path: Path) -> Iterator[Any]:
    """W&B's file: 7 bytes, then LevelDB's log format, blocks of 32 KiB that hold W&B's own messages."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service writes the file, and may still be at it when a run is finished
    data, at, message = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(message)
            yield record
            message = b""


def test_wandb_reads_training_and_evaluations_back(tmp_path: Path, offline_wandb: None) -> None:
    run = tmp_path / "run-7"
    run.mkdir()
    log("wandb", run, RECORDS[:1], RECORDS[1:])
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(path))
    (about,) = [record.run for record in records if record.HasField("run")]
    assert (about.project, about.display_name) == ("small", "run-7")
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert (config["batch"], config["optimizer"]) == (8, {"name": "adamw", "lr": 0.1})
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row.get("train/lr"), row.get("eval/accuracy")) for row in history] == [
        (1, 0.1, None), (2, 0.05, None), (2, None, 0.25), (3, 0.025, None)
    ]  # fmt: skip
    assert math.isnan(float(history[1]["train/loss"]))


def log_media(name: str, run: RunFolder) -> None:
    (logger,) = open_loggers([name], run, SETTINGS)
    for kind, value in {"image": PIXELS, "text": "one\n  two", "histogram": [0.0, 1.0, 1.0]}.items():
        logger.write_media(media.record(run, kind, "a/b", value, 3))
    logger.write(RECORDS[:1])
    logger.close()


def test_tensorboard_reads_images_texts_and_histograms_back(tmp_path: Path) -> None:
    log_media("tensorboard", RunFolder(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (image,), (text,) = reader.Images("image/a/b"), reader.Tensors("text/a/b/text_summary")
    assert (image.step, image.width, image.height) == (3, 2, 1)
    assert image.encoded_image_string == RunFolder(tmp_path).image("a/b", 3).read_bytes()
    assert text.tensor_proto.string_val == [b"    one\n      two"]
    found = reader.Histograms("histogram/a/b")[0].histogram_value
    assert (found.num, found.sum, sum(found.bucket), found.min, found.max) == (3, 2, 3, 0, 1)
    assert reader.Scalars("train/loss")[0].value == 2.5


def test_wandb_gets_images_texts_and_histograms(tmp_path: Path, offline_wandb: None) -> None:
    log_media("wandb", RunFolder(tmp_path))
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    items = [item for record in wandb_records(path) for item in record.history.item]
    found = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
    assert found["image/a/b/_type"] == "image-file" and found["text/a/b/_type"] == "table-file"
    assert sum(found["histogram/a/b/values"]) == 3 and found["train/loss"] == 2.5


def test_mlflow_gets_images_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path / "run-7")
    run.path.mkdir()
    log_media("mlflow", run)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.mlflow_database}")
    artifacts = {each.path: client.list_artifacts(run.mlflow_id.read_text().strip(), each.path)
                 for each in client.list_artifacts(run.mlflow_id.read_text().strip())}  # fmt: skip
    assert {kind: len(found) for kind, found in artifacts.items()} == {"image": 1, "text": 1}


def test_a_logger_without_media_keeps_its_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_media("csv", RunFolder(tmp_path))
    assert rows(tmp_path)[0]["loss"] == "2.5" and capsys.readouterr().out == ""


def test_a_logger_whose_media_fail_keeps_its_metrics(
    tmp_path: Path, offline_wandb: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    log_media("wandb", RunFolder(tmp_path))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert "disabled for images, texts and histograms" in line
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    keys = {"/".join(item.nested_key) or item.key for record in wandb_records(path) for item in record.history.item}
    assert "train/loss" in keys


def test_a_resumed_run_is_the_same_wandb_run(tmp_path: Path, offline_wandb: None) -> None:
    log("wandb", tmp_path, RECORDS[:2])
    log("wandb", tmp_path, RECORDS[2:])
    names = {record.run.run_id for path in tmp_path.glob("wandb/offline-run-*/*.wandb")
             for record in wandb_records(path) if record.HasField("run")}  # fmt: skip
    assert len(names) == 1


def test_mlflow_reads_training_and_evaluations_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run-7"
    run.mkdir()
    log("mlflow", run, RECORDS[:2])
    log("mlflow", run, RECORDS[2:])  # the same run goes on
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("run-7", "FINISHED")
    assert (found.data.params["batch"], found.data.params["optimizer.lr"]) == ("8", "0.1")
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [metric.step for metric in losses] == [1, 2, 3]
    assert (losses[0].value, math.isnan(losses[1].value), losses[2].value) == (2.5, True, 1.25)
    assert losses[2].timestamp == 2000000000500
    assert [metric.value for metric in client.get_metric_history(found.info.run_id, "eval/accuracy")] == [0.25]
    assert [path.name for path in tmp_path.iterdir()] == ["run-7"]  # nothing beside the run folder


@pytest.mark.parametrize(
    ("name", "package"),
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("mlflow", "mlflow"), ("mlflow", "sqlalchemy")],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TrainError) as caught:
        open_loggers(["csv", name], RunFolder(tmp_path), {})
    assert caught.value.code == "train.logger-not-installed"
    assert caught.value.fix == f"pip install 'paceline[{name}]'"


def test_a_place_that_cannot_be_opened_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    with pytest.raises(TrainError, match="'mlflow' could not be opened") as caught:
        open_loggers(["mlflow"], RunFolder(tmp_path), {})
    assert caught.value.code == "train.logger-failed"


def test_a_place_that_fails_while_training_runs_is_warned_about_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (logger,) = open_loggers(["csv"], RunFolder(tmp_path / "gone"), {})
    logger.write(RECORDS)
    logger.write(RECORDS)
    logger.close()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: Logger 'csv' failed and is disabled") and line.endswith(
        "metrics.jsonl contains all metrics."
    )


def test_metrics_are_converted_to_csv(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [*STEPS, {"no": "step"}, evaluation(10, loss=3.0)])
    path = convert(run, "csv", tmp_path / "elsewhere")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert path == tmp_path / "elsewhere" / "metrics.csv" and [row["step"] for row in rows] == [
        *map(str, range(1, 11)),
        "10",
    ]
    assert rows[-1]["eval/loss"] == "3.0" and float(rows[4]["loss"]) == 0.4 and rows[4]["samples_per_second"] == "500.0"


def test_metrics_are_converted_to_tensorboard(tmp_path: Path) -> None:
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
