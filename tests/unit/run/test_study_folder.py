from __future__ import annotations

import math
from pathlib import Path

from paceline.run import study_folder
from paceline.run.ledger import Ledger
from paceline.run.study_folder import StudyFolder


def test_values_are_those_of_evaluations(tmp_path: Path) -> None:
    trial = StudyFolder(tmp_path).trial(3)
    assert trial.path == tmp_path / "trials" / "0003"
    assert study_folder.values(trial, "loss") == [] and study_folder.steps_of(trial) == 0
    trial.path.mkdir(parents=True)
    trial.metrics.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
    assert study_folder.values(trial, "loss", has_ended=False) == []
    assert study_folder.values(trial, "loss") == [(1, 3.0), (2, 2.0)]
    study_folder.append_evaluation(trial, 2, "loss", 2.5)
    with trial.metrics.open("a") as file:
        file.write('{"evaluation": true, "step": 3, "loss": null}\n{"evaluation": tr')
    (first, value), (last, missing) = study_folder.values(trial, "loss")
    assert (first, value, last) == (2, 2.5, 3) and math.isnan(missing)
    assert study_folder.steps_of(trial) == 3


def test_launches_that_ended_well_are_counted(tmp_path: Path) -> None:
    trial = StudyFolder(tmp_path).trial(0)
    trial.path.mkdir(parents=True)
    for status in (0, 137, 0):
        Ledger(trial).note("ended", status=status)
    assert study_folder.completed_launches(trial) == 2
