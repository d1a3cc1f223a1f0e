"""Runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.run.folder import RunFolder
from paceline.watch.run_comparison import By, common_positions, comparison, differing_keys
from paceline.watch.run_facts import read_facts
from watched import FAILED, HOSTILE, START, STEPS, evaluation, run_folder, step


def compared(*folders: RunFolder, by: By = "step") -> list[list[str]]:
    """The words of each line."""
    text = comparison([read_facts(folder) for folder in folders], by)
    assert not set(text) & set("\x1b\r\x00\x9b\u202e")
    return [line.split() for line in text.splitlines()]


def two(path: Path) -> tuple[RunFolder, RunFolder]:
    fast = [step(n, loss=1.0, time=START + n / 2) for n in range(2, 9, 2)] + [evaluation(8, accuracy=0.5)]
    return (
        run_folder(path / "a", STEPS, config="batch: 8\nmodel: {width: 16, name: gpt}\n"),
        run_folder(path / "b", fast, FAILED, config="batch: 8\nmodel: {width: 32, name: gpt}\nema: null\n"),
    )


def test_results_and_differing_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = compared(*two(tmp_path))
    assert ["run", "a", "b"] in lines and ["state", "finished", "failed", "(exception)"] in lines
    assert ["step", "10", "of", "10", "8", "of", "10"] in lines
    assert ["final", "loss", "0.2", "1"] in lines
    assert ["best", "loss", "0.2", "(step", "10)", "1", "(step", "2)"] in lines
    assert ["final", "validation", "accuracy", "–", "0.5"] in lines
    assert ["model.width", "16", "32"] in lines and ["ema", "–", "null"] in lines
    assert not any("batch" in line or "model.name" in line for line in lines)


@pytest.mark.parametrize(
    ("by", "rows"),
    [
        ("step", [["2", "1", "1"], ["4", "0.5", "1"], ["6", "0.33333", "1"], ["8", "0.25", "1"]]),
        ("samples", [["16", "1", "1"], ["32", "0.5", "1"], ["48", "0.33333", "1"], ["64", "0.25", "1"]]),
        ("time", [["no", "loss", "at", "a", "common", "time", "(s)"]]),
    ],
)
def test_losses_at_the_same_position(tmp_path: Path, by: By, rows: list[list[str]]) -> None:
    lines = compared(*two(tmp_path), by=by)
    assert lines[-len(rows) :] == rows


def test_losses_at_the_same_time(tmp_path: Path) -> None:
    slow, fast = (
        run_folder(tmp_path / str(pace), [step(n, loss=float(n), time=START + pace * n) for n in range(1, 21)])
        for pace in (2, 1)
    )
    lines = compared(slow, fast, by="time")
    assert ["20.0", "10", "20"] in lines and lines[-8] == ["2.0", "1", "2"]


def test_a_run_with_nothing_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    lines = compared(run_folder(tmp_path / "a"), RunFolder(tmp_path / "empty"), by="samples")
    said = [" ".join(line) for line in lines]
    assert "final loss 0.2 –" in said and "no loss at a common number of samples" in said
    assert "empty: no readable recipe" in said and "empty: the batch is unknown" in said


def test_hostile_recipes(tmp_path: Path) -> None:
    texts = [json.dumps({f"{HOSTILE}{n}": HOSTILE for n in range(100)}), json.dumps({HOSTILE: {"x": HOSTILE}})]
    lines = compared(*(run_folder(tmp_path / str(n), config=text) for n, text in enumerate(texts)))
    assert ["and", "41", "other", "keys"] in lines


def test_values_are_compared_with_their_types() -> None:
    recipes = [{"a": 1, "b": float("nan"), "c": None}, {"a": True, "b": float("nan")}]
    assert differing_keys(recipes) == ["a", "c"]


def test_few_positions_of_many() -> None:
    long = [(float(n), 0.0) for n in range(1000)]
    assert common_positions([long, long]) == [n * 999 // 7 for n in range(8)]
    assert common_positions([long, long[:1]]) == [0.0] and common_positions([long[:5], long[5:]]) == []
