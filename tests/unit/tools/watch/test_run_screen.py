"""One run on one screen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.run.folder import RunFolder
from paceline.tools.watch.run_facts import read_facts
from paceline.tools.watch.run_screen import By, common_positions, comparison, differing_keys, screen, screen_values
from watched import FAILED, FAILURE, FINISHED, HOSTILE, START, STEPS, evaluation, run_folder, step


def shown(folder: RunFolder) -> str:
    text = screen(read_facts(folder))
    json.dumps(screen_values(read_facts(folder)), allow_nan=False)
    assert not set(text) & set("\x1b\r\x00\x9b\u202e")
    return text


def test_a_finished_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "gpt", [*STEPS, evaluation(5, accuracy=0.5), evaluation(10, accuracy=0.4)])
    (folder.checkpoints / "step-000010").mkdir(parents=True)
    folder.latest.write_text("step-000010")
    folder.rank_log(0).write_text("text\nwarning: slow\nwarning: slow\n")
    text = shown(folder)
    assert "gpt: finished\n  step 10 of 10, epoch 0, 10.0 s, 2 ranks, 1 node, last update " in text
    assert "first 2, last 0.2, best 0.2 (step 10)" in text and "█" in text
    assert "first 0.5, last 0.4, best 0.5 (step 5)" in text and "validation accuracy" in text
    assert "last 1.0k samples/s, median 750" in text and text.count("warning: slow") == 1
    assert "step-000010  10    0 B   latest" in text
    assert "time in training steps:" in text and f"logs: {folder.logs} (1 rank)" in text
    assert len(text.splitlines()) <= 24


def test_the_mode_of_save_best_decides_what_is_best(tmp_path: Path) -> None:
    records = [step(1), evaluation(1, drift=0.25), evaluation(2, drift=0.75)]
    config = "save_best:\n  metric: drift\n  mode: min\n"
    folder = run_folder(tmp_path / "run", records, config=config)
    assert "last 0.75, best 0.25 (step 1)" in shown(folder)
    assert screen_values(read_facts(folder))["evaluations"]["drift"]["best"] == {"step": 1, "value": 0.25}
    other = run_folder(tmp_path / "other", records, config=config)
    assert "0.25 (step 1)" in comparison([read_facts(folder), read_facts(other)], "step")


def test_a_rank_that_ended_without_a_word_is_not_explained_by_the_error_of_another(tmp_path: Path) -> None:
    lost = {"state": "failed", "status": 72, "cause": "lost-connection", "rank": 0, "step": 10, **FAILURE}
    lost |= {"what": "rank 0 lost the connection to each other", "fix": "no rank died, so check the network"}
    folder = run_folder(tmp_path / "torchrun", STEPS, events=[*FINISHED[:2], (START + 5, "rank-ended", lost)])
    text = shown(folder)
    assert "failed: killed or exited without a word on rank 1 after step 10" in text
    assert "rank 1 was killed or exited without a word; rank 0 then lost the connection" in text
    assert "fix: check the limits of the scheduler or the container, and what rank 1 printed" in text
    assert "no rank died" not in text and "Traceback" not in text and "look()" not in text


def test_a_failed_run(tmp_path: Path) -> None:
    text = shown(run_folder(tmp_path, events=FAILED))
    assert (
        "failed: ValueError on rank 1 after step 4\n  at: train.py:17, in main: look()\n"
        "  rank 1 raised ValueError in step 5\n  Traceback:\n    boom\n  fix: lower it\n"
    ) in text
    assert "hang: rank 1 made no progress for 40 s (missing)" in text
    end = screen_values(read_facts(run_folder(tmp_path / "again", events=FAILED)))["end"]
    assert (end["cause"], end["rank"], end["step"], end["status"]) == ("exception", 1, 4, 1)
    assert {name: end[name] for name in FAILURE} == FAILURE


def test_the_end_of_a_long_traceback_is_shown(tmp_path: Path) -> None:
    lines = "\n".join(f"line {number}" for number in range(500))
    text = shown(run_folder(tmp_path, events=[FINISHED[0], (START + 1, "failed", {"text": lines, "fix": "do it"})]))
    assert "line 0\n" in text and "  …\n" in text and "line 499\n  fix: do it\n" in text and "line 100\n" not in text


def test_an_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    text = shown(RunFolder(tmp_path))
    assert text.splitlines()[0].endswith("unknown (no ledger)") and "no steps" in text
    assert "no checkpoints" in text and "no logs" in text
    assert "ledger.jsonl is missing" in text and "metrics.jsonl is missing" in text


def test_a_truncated_metrics_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    os.truncate(folder.metrics, folder.metrics.stat().st_size - 5)
    text = shown(folder)
    assert "step 9 of 10" in text and "1 unreadable line in metrics.jsonl" in text


def test_hostile_text_in_every_field(tmp_path: Path) -> None:
    name = HOSTILE.replace("\0", "").replace("/", "")
    events = [
        (START, "launched", {"ranks": HOSTILE, "nodes": [HOSTILE], "generation": HOSTILE}),
        (START + 1, "hang", {"kind": HOSTILE, "ranks": [HOSTILE, 1], "seconds": HOSTILE}),
        (START + 1, "hang", {"kind": {}, "ranks": HOSTILE, "seconds": 1e300}),
        (START + 2, "rank-ended", {"state": HOSTILE, "rank": 10**30, "step": HOSTILE, "text": [HOSTILE]}),
        (START + 2, "failed", {"cause": HOSTILE, "rank": HOSTILE, "step": HOSTILE, "text": HOSTILE, "line": HOSTILE}),
    ]
    records = [step(1, loss=HOSTILE, lr=HOSTILE, epoch=HOSTILE), evaluation(1, **{HOSTILE: 1.0, "x": HOSTILE})]
    folder = run_folder(tmp_path / name, records, events, config=f"batch: {json.dumps(HOSTILE)}\n")
    (folder.checkpoints / f"step-{name}").mkdir(parents=True)
    folder.rank_log(0).write_text(f"warning: {HOSTILE}\n")
    text = shown(folder)
    assert "hang: rank 1 made no progress for – s (abcd e[bold]" in text
    assert "validation abcd e[bold]<script>" in text


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
    assert ["run", "a", "b"] in lines and ["state", "finished", "failed", "(ValueError", "on", "rank", "1)"] in lines
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
