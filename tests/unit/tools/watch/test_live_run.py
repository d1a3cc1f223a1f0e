"""Runs that are followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.run.folder import RunFolder
from paceline.tools.watch import live_run
from paceline.tools.watch.live_run import LiveRun
from watched import FINISHED, run_folder, step


@pytest.fixture(autouse=True)
def every_update_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "_SECONDS_BETWEEN", 0.0)


def append(folder: RunFolder, *steps: int) -> None:
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps(step(n)) + "\n" for n in steps)


def test_new_steps_are_found(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    run = LiveRun(folder)
    assert run.facts.step == 10 and run.is_complete
    generation = run.generation
    append(folder, 11, 12)
    run.update()
    assert run.facts.step == 12 and run.generation == generation


def test_a_run_that_resumes_from_an_earlier_step(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    run = LiveRun(folder)
    run.update()
    generation = run.generation
    append(folder, 6)
    run.update()
    assert run.facts.step == 6 and run.generation > generation
    generation = run.generation
    new = folder.path / "new"
    new.write_text("".join(json.dumps(step(n)) + "\n" for n in range(1, 5)))
    new.replace(folder.metrics)
    run.update()
    assert run.facts.step == 4 and run.generation > generation


def test_of_a_large_file_the_end_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "_LARGE", 1000)
    monkeypatch.setattr(live_run, "TAIL_BYTES", 2000)
    folder = run_folder(tmp_path / "run", [step(n) for n in range(1, 2001)])
    run = LiveRun(folder)
    run.update()
    assert run.facts.step == 2000 and run.facts.problems == []
    run.read_everything()
    assert len(run.facts.metrics["loss"]) == 2000 and run.is_complete and run.read_fraction == 1.0
    append(folder, 2001)
    run.update()
    assert run.facts.step == 2001 and len(run.facts.metrics["loss"]) == 2001


def test_a_kept_value_is_made_again_when_the_ledger_changes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", events=FINISHED[:2])
    run, made = LiveRun(folder), []
    for _ in range(3):
        run.update()
        run.kept("x", lambda: made.append(1))
    assert len(made) == 1
    with folder.ledger.open("a") as file:
        file.write(json.dumps({"time": 1_763_220_005.0, "event": "warning", "text": "x"}) + "\n")
    run.update()
    run.kept("x", lambda: made.append(1))
    assert len(made) == 2


def test_a_run_without_metrics_says_so(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    folder.metrics.unlink()
    run = LiveRun(folder)
    assert run.facts.problems == ["metrics.jsonl is missing: no metrics"]
    append(folder, 1)
    run.update()
    assert run.facts.step == 1 and run.facts.problems == []
