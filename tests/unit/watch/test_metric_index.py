"""Metrics in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run.folder import RunFolder
from paceline.watch import metric_index
from paceline.watch.metric_series import RunMetrics
from paceline.watch.record_stream import RecordStream
from watched import evaluation, run_folder, step


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(folder: RunFolder) -> tuple[RunMetrics, RecordStream]:
    metrics, stream = RunMetrics(), RecordStream(folder.metrics)
    metrics.extend(stream)
    return metrics, stream


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    records = [step(n, grad_norm=0.5, skipped=True) for n in range(1, 500)]
    return run_folder(tmp_path / "run", [*records, {"no": "step"}, evaluation(499, loss=2.0)])


def test_an_index_gives_the_same_metrics_and_continues(folder: RunFolder) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    metrics, stream = read(folder)
    metric_index.store(folder, metrics, stream)
    assert {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")} == before
    with folder.metrics.open("a") as file:
        file.write('{"step": 500, "loss": 7.0}\n')
    loaded = metric_index.load(folder)
    assert loaded is not None
    again, rest = loaded
    again.extend(rest)
    metrics.extend(stream)
    assert again == metrics and again["loss"].last == 7.0 and again.problems == ["1 unreadable line in metrics.jsonl"]


def test_an_index_of_another_file_is_ignored(folder: RunFolder) -> None:
    assert metric_index.load(folder) is None
    metric_index.store(folder, *read(folder))
    text = folder.metrics.read_text()
    folder.metrics.write_text(text.replace('"step": 498', '"step": 497'))
    assert metric_index.load(folder) is None
    folder.metrics.write_text(text[:1000])
    assert metric_index.load(folder) is None
    folder.metrics.unlink()
    assert metric_index.load(folder) is None


def test_a_damaged_index_is_ignored(folder: RunFolder, cache: Path) -> None:
    metric_index.store(folder, *read(folder))
    (index,) = cache.rglob("*.index")
    content = index.read_bytes()
    for damaged in (b"", b"{}\n", b"[]\n", content[: len(content) // 2], b"\xff" + content):
        index.write_bytes(damaged)
        assert metric_index.load(folder) is None
    index.write_bytes(content)
    assert metric_index.load(folder) is not None


def test_a_cache_that_cannot_be_written_is_no_error(folder: RunFolder, cache: Path) -> None:
    cache.write_text("a file")
    metric_index.store(folder, *read(folder))
    assert metric_index.load(folder) is None


def test_only_the_newest_indexes_are_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_index, "_MAX_INDEXES", 2)
    folders = [run_folder(tmp_path / f"run-{n}") for n in range(4)]
    for folder in folders:
        metric_index.store(folder, *read(folder))
    assert len(list(cache.rglob("*.index"))) == 2 and metric_index.load(folders[-1]) is not None


def test_a_user_without_a_home_has_no_index(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    metric_index.store(folder, *read(folder))
    assert metric_index.load(folder) is None
