"""Runs belong to the script that created them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny
from paceline.guard import origin
from paceline.run.folder import RunFolder


def as_script(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "main_script", lambda: path)


def trained(monkeypatch: pytest.MonkeyPatch, script: Path, **settings: Any) -> str:
    as_script(script, monkeypatch)
    trainer = tiny.classifier_trainer(resume="auto", **settings)
    return Path(str(trainer.train(tiny.blobs(), max_steps=trainer.step_count + 1).run)).name


def test_a_run_without_a_name_is_called_after_its_script_and_continued_by_it(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = in_folder / "a" / "train.py", in_folder / "b" / "train.py"
    assert trained(monkeypatch, one, run=None) == "train"
    assert trained(monkeypatch, in_folder / "other.py", run=None) == "other"
    capsys.readouterr()
    assert trained(monkeypatch, two, run=None) == "train-2"  # the run of another script is not continued
    said = capsys.readouterr().out
    assert "runs/train belongs to ../a/train.py, not to" in said and "b/train.py: it is not resumed" in said
    assert [trained(monkeypatch, script, run=None) for script in (one, two, one)] == ["train", "train-2", "train"]
    assert "belongs" not in capsys.readouterr().out
    assert trained(monkeypatch, one, run="shared") == "shared"
    assert trained(monkeypatch, two, run="shared") == "shared"  # asked for by its name
    assert "runs/shared was trained by ../a/train.py, and is now continued by" in capsys.readouterr().out


def test_the_second_model_of_a_script_has_its_class_in_the_name(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_script(in_folder / "gan.py", monkeypatch)
    names = [origin.default_name(model) for model in ("generator", "critic", "generator", "critic")]
    assert names == ["gan", "gan-critic", "gan", "gan-critic"]


def test_a_run_of_an_unknown_script_is_continued(in_folder: Path) -> None:
    folder = RunFolder.create("train")
    folder.config.touch()
    assert origin.find("train", in_folder / "train.py") == (folder, None)
    for damaged in ("", "[]", json.dumps({"script": 3})):
        folder.derived.write_text(damaged)
        assert origin.find("train", in_folder / "train.py") == (folder, None)


def test_tests_and_notebooks_have_no_script() -> None:
    assert origin.main_script() is None and origin.default_name("linear") == "linear"
