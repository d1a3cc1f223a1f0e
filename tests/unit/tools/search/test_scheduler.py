"""Trials whose launchers do not start; tests/ranks/test_sweep.py has whole sweeps."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import LaunchError, SearchError
from paceline.run import study_folder
from paceline.run.folder import RunFolder
from paceline.run.study_folder import StudyFolder
from paceline.tools.search import scheduler
from paceline.tools.search.placement import Machine, Pool, TrialSlot
from paceline.tools.search.scheduler import Sweep
from paceline.tools.search.study import Study
from paceline.tools.search.trial import Trial


class Trials:
    """Each start is noted in a file. It fails where `is_refused` says so, and is complete otherwise."""

    def __init__(self, notes: Path, is_refused: Callable[[TrialSlot, int], bool]) -> None:
        self._notes, self._is_refused = notes, is_refused

    def body(self, trial: Trial, folder: RunFolder, slot: TrialSlot, fraction: float | None) -> int:
        earlier = len(self.starts())
        with self._notes.open("a") as notes:
            notes.write(json.dumps([trial.number, str(slot)]) + "\n")
        if self._is_refused(slot, earlier):
            raise LaunchError("node-unavailable", "The launcher did not start.")
        study_folder.append_evaluation(folder, 1, "loss", 1.0)
        return 0

    def starts(self) -> list[list[object]]:
        return [json.loads(line) for line in self._notes.read_text().splitlines()] if self._notes.exists() else []


@pytest.fixture(autouse=True)
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MAX_REST", 0.0)


def sweep(tmp_path: Path, trials: Trials, *, count: int, machines: str = "a", retries: int = 0) -> Study:
    space = {"x": "uniform(0, 1)"}
    study = Study.open(str(tmp_path / "study"), space, trials=count, retries=retries, sampler="random")
    Sweep(study, Pool([Machine(name, ("0",)) for name in machines], 1, 1, "hosts"), trials).run()
    return study


def test_a_launch_that_did_not_start_is_no_failure_of_its_trial(tmp_path: Path) -> None:
    trials = Trials(tmp_path / "notes", lambda slot, earlier: earlier % 4 != 3)
    study = sweep(tmp_path, trials, count=2)
    assert [(each.state, each.accidents, each.verdict) for each in study.trials()] == [("complete", 0, "")] * 2
    assert [number for number, _ in trials.starts()] == [0] * 4 + [1] * 4


def test_a_sweep_ends_when_nothing_starts_and_the_same_command_continues_it(tmp_path: Path) -> None:
    down = tmp_path / "down"
    down.touch()
    trials = Trials(tmp_path / "notes", lambda slot, earlier: down.exists())
    with pytest.raises(SearchError, match=r"(?s)search\.no-launch.*launch\.node-unavailable"):
        sweep(tmp_path, trials, count=1)
    assert [each.state for each in Study.load(StudyFolder(tmp_path / "study")).trials()] == ["running"]
    down.unlink()
    assert [each.state for each in sweep(tmp_path, trials, count=1).trials()] == ["complete"]


def test_a_place_where_launchers_do_not_start_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_MAX_REST", 3600.0)
    monkeypatch.setattr(scheduler, "_FIRST_REST", 3600.0)
    trials = Trials(tmp_path / "notes", lambda slot, earlier: str(slot) == "a")
    study = sweep(tmp_path, trials, count=3, machines="ab")
    assert [each.state for each in study.trials()] == ["complete"] * 3
    assert [place for _, place in trials.starts()] == ["a", "b", "b", "b"]


def test_under_nohup_a_hangup_does_not_stop_a_sweep(tmp_path: Path) -> None:
    def hang_up(slot: TrialSlot, earlier: int) -> bool:
        os.kill(os.getppid(), signal.SIGHUP)
        return False

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        study = sweep(tmp_path, Trials(tmp_path / "notes", hang_up), count=2)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [each.state for each in study.trials()] == ["complete"] * 2
