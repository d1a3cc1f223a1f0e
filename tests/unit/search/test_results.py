from __future__ import annotations

from pathlib import Path

from paceline.config.recipe import Config
from paceline.config.sections import SweepSection
from paceline.run.study_folder import StudyFolder
from paceline.search import results
from paceline.search.study import Study

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


def test_a_curve_falls_on_a_scale_that_trials_share() -> None:
    assert results.sparkline({0: 8.0, 1: 4.0, 2: 1.0}, 1.0, 8.0) == "█▄▁"
    assert len(results.sparkline(dict.fromkeys(range(1000), 1.0), 1.0, 2.0)) == 24
    assert results.sparkline({}, 0.0, 0.0) == ""


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
    assert "&lt;b&gt;" in page and page.count("plotly.js v") == 1
    assert "<script src" not in page and "cdn.plot.ly" not in page.split("</script>")[-1]
