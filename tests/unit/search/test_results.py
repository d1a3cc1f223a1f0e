from __future__ import annotations

import re
from pathlib import Path

from paceline.config.recipe import Config
from paceline.config.sections import SweepSection
from paceline.run.study_folder import StudyFolder
from paceline.search import results
from paceline.search.study import Study
from watched import charts_in, embedded_values

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


def test_the_page_needs_no_network_and_escapes_text(tmp_path: Path) -> None:
    study = study_of(tmp_path / "a")
    results.write_html(study)
    page = study.folder.report.read_text()
    assert "<b>" in str(embedded_values(page)) and "<b>" not in page
    assert not re.search(r"<link|<img|src=|href=|url\(|@import|https?://", page)


def test_the_page_has_the_history_curves_and_a_slice_for_each_parameter(tmp_path: Path) -> None:
    study = study_of(tmp_path / "a")
    results.write_html(study)
    charts = charts_in(study.folder.report.read_text())
    assert list(charts) == ["History", "Curves of the best 3 trials", "optimizer.lr", "model.width"]
    best = charts["Curves of the best 3 trials"]["series"][0]
    assert best["name"] == "trial 1" and best["line"][-1] == [39.0, 1.025]
    trials, line = charts["History"]["series"]
    assert trials["points"] == [[0.0, 3.0], [1.0, 1.0], [2.0, 2.0]] and [value for _, value in line["line"]] == [
        3,
        1,
        1,
    ]
    assert charts["optimizer.lr"]["x"]["log"] == 10 and charts["model.width"]["x"]["names"] == ["16", "32"]


def test_a_study_without_a_result_has_a_page(tmp_path: Path) -> None:
    section = SweepSection(space={"optimizer.lr": "log(1e-5, 1e-2)"}, sampler="random")
    study = Study(StudyFolder(tmp_path / "a"), section, RECIPE)
    results.write_html(study)
    study.tell(study.ask().number, state="failed")
    results.write_html(study)
    assert "1 trial: 1 failed" in study.folder.report.read_text()


def test_a_metric_may_be_negative_and_choices_may_be_equal(tmp_path: Path) -> None:
    section = SweepSection(space={"model.bias": [True, 1]}, sampler="grid")
    study = Study(StudyFolder(tmp_path / "a"), section, RECIPE)
    for value in (-2.5, -2.4):
        trial = study.ask()
        study.tell(trial.number, value)
    results.write_html(study)
    chart = charts_in(study.folder.report.read_text())["model.bias"]
    assert chart["x"]["names"] == ["True", "1"]
    assert sorted(chart["series"][0]["points"]) == [[0.0, -2.5], [1.0, -2.4]]
