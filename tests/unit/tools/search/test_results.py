from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.config.recipe import Config
from paceline.config.sections import SweepSection
from paceline.run.study_folder import StudyFolder
from paceline.tools.search import results
from paceline.tools.search.study import Study
from watched import embedded_values

RECIPE = {"model": "mlp", "optimizer": {"name": "sgd"}, "batch": 8}


def study_of(folder: Path) -> Study:
    section = SweepSection(space={"optimizer.lr": "log(1e-5, 1e-2)", "model.width": [16, 32]}, sampler="random")
    study = Study(StudyFolder(folder), section, RECIPE)
    for value in (3.0, 1.0, 2.0):
        trial = study.ask()
        for step in range(40):
            study.report(trial.number, step, value + 1 / (1 + step))
        study.tell(trial.number, value)
    failed = study.ask()
    study.update(failed.number, verdict="gpu-memory on rank 0 <b>")
    study.tell(failed.number, state="failed")
    return study


def test_the_best_trial_stands_first(tmp_path: Path) -> None:
    text = results.summary(study_of(tmp_path / "a"))
    lines = text.splitlines()
    assert lines[0] == "4 trials: 3 complete, 1 failed; 0 steps"
    assert [line.split()[:2] for line in lines[3:6]] == [["1", "1"], ["2", "2"], ["0", "3"]]
    assert "trial 3 failed: gpu-memory on rank 0 <b>" in lines
    assert any(line.startswith("importance of parameters") for line in lines)


def test_the_best_recipe_is_ready_to_run(tmp_path: Path) -> None:
    study = study_of(tmp_path / "a")
    best = results.write_best(study)
    assert best is not None and best.number == 1
    config = Config.from_file(study.folder.best_recipe)
    assert config.model is not None and config.model.options() == {"width": best.params["model.width"]}
    assert (config.optimizer.name, config.optimizer.lr, config.batch) == ("sgd", best.params["optimizer.lr"], 8)


def sweep_on(study: Study) -> dict[str, Any]:
    """What the page shows."""
    results.write_html(study)
    return dict(embedded_values(study.folder.report.read_text())["sweep"])


def test_the_page_needs_no_network_and_escapes_text(tmp_path: Path) -> None:
    study = study_of(tmp_path / "a")
    assert "<b>" in str(sweep_on(study))
    page = study.folder.report.read_text()
    assert "<b>" not in page and not re.search(r"<link|<img|src=|href=|url\(|@import|https?://", page)


def test_the_page_has_all_trials_with_their_parameters_and_curves(tmp_path: Path) -> None:
    study = study_of(tmp_path / "a")
    shown = sweep_on(study)
    assert [(each["number"], each["value"], each["state"]) for each in shown["trials"]] == [
        (1, 1.0, "complete"), (2, 2.0, "complete"), (0, 3.0, "complete"), (3, None, "failed")
    ]  # fmt: skip
    best, *_, failed = shown["trials"]
    assert best["curve"][-1] == [39, 1.025] and best["params"] == study.trials()[1].params
    assert failed["verdict"] == "gpu-memory on rank 0 <b>" and (shown["metric"], shown["minimizes"]) == ("loss", True)
    assert shown["space"] == [
        {"key": "optimizer.lr", "log": True, "choices": None}, {"key": "model.width", "log": False, "choices": [16, 32]}
    ]  # fmt: skip
    assert shown["counts"] == "3 complete, 1 failed" and set(shown["importances"]) <= {"optimizer.lr", "model.width"}


def test_a_study_without_a_result_has_a_page(tmp_path: Path) -> None:
    section = SweepSection(space={"optimizer.lr": "log(1e-5, 1e-2)"}, sampler="random")
    study = Study(StudyFolder(tmp_path / "a"), section, RECIPE)
    assert sweep_on(study)["trials"] == []
    study.tell(study.ask().number, state="failed")
    assert sweep_on(study)["counts"] == "1 failed"


def test_choices_may_be_equal_and_of_any_type(tmp_path: Path) -> None:
    section = SweepSection(space={"model.bias": [True, 1, None, [1, 2]]}, sampler="grid")
    study = Study(StudyFolder(tmp_path / "a"), section, RECIPE)
    for value in (-2.5, -2.4):
        study.tell(study.ask().number, value)
    shown = sweep_on(study)
    assert str(shown["space"][0]["choices"]) == "[True, 1, None, [1, 2]]"
    assert {str(each["params"]["model.bias"]) for each in shown["trials"]} <= {"True", "1", "None", "[1, 2]"}
