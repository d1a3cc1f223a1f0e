"""Runs by name and path."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.run.study_folder import StudyFolder
from paceline.watch import run_lookup
from watched import HOSTILE, run_folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "runs" / "gpt").checkpoints.mkdir()
    study = StudyFolder(tmp_path / "runs" / "sweep")
    study.create()
    study.write_settings({})
    run_folder(study.trial(0).path)
    study.trial_output(0).write_text("text")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "file").write_text("text")
    return tmp_path / "runs"


@pytest.mark.parametrize("name", ["gpt", "runs/gpt", "runs/gpt/", "runs/gpt/checkpoints", "gpt/checkpoints"])
def test_a_run_is_found(runs: Path, name: str) -> None:
    assert run_lookup.find_run(name).path == runs / "gpt"


def test_a_trial_is_found(runs: Path) -> None:
    assert run_lookup.find_run("sweep/trials/0000").path == runs / "sweep" / "trials" / "0000"


@pytest.mark.parametrize(
    "name", ["gtp", "runs/empty", "runs/file", "sweep", "x" * 5000, "a\0b", "/proc/1/root", HOSTILE]
)
def test_anything_else_is_an_error(runs: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as error:
        run_lookup.find_run(name)
    assert error.value.code == "checkpoint.no-run"
    assert "\x1b" not in str(error.value) and len(str(error.value)) < 500


def test_the_error_suggests_a_run(runs: Path) -> None:
    with pytest.raises(CheckpointError, match=r"did you mean 'gpt'\?"):
        run_lookup.find_run("gtp")
    with pytest.raises(CheckpointError, match=r"is a study.*\n.*runs/sweep/trials/0000"):
        run_lookup.find_run("sweep")


def test_what_a_folder_contains(runs: Path) -> None:
    assert run_lookup.run_paths(runs) == [runs / "gpt"] == run_lookup.run_paths(runs / "gpt")
    assert run_lookup.study_paths(runs) == [runs / "sweep"]
    assert run_lookup.trial_paths(runs / "sweep") == [runs / "sweep" / "trials" / "0000"]
    assert run_lookup.run_paths(runs / "missing") == []
