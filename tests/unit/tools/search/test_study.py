from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError, LaunchError, SearchError
from paceline.run.study_folder import StudyFolder
from paceline.tools.search.study import Study

SPACE = {"lr": "log(1e-5, 1e-2)"}


@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_a_study_is_a_folder(tmp_path: Path, storage: str) -> None:
    study = Study.open(str(tmp_path / "a"), SPACE, trials=3, storage=storage, sampler="random")
    for value in (3.0, 1.0):
        study.tell(study.ask().number, value)
    again = Study.load(StudyFolder(tmp_path / "a"))
    assert [trial.value for trial in again.trials()] == [3.0, 1.0]
    assert again.best == again.trials()[1] and not again.is_full
    assert again.trials() == study.trials()


def test_a_study_goes_on_only_with_the_same_search(tmp_path: Path) -> None:
    Study.open(str(tmp_path / "a"), SPACE, trials=3)
    assert Study.open(str(tmp_path / "a"), SPACE, trials=5, parallel=2).size == 5
    for space, settings in (({"lr": "log(1e-5, 1e-3)"}, {}), (SPACE, {"seed": 1}), (SPACE, {"metric": "accuracy"})):
        with pytest.raises(SearchError, match=r"search\.other-study"):
            Study.open(str(tmp_path / "a"), space, trials=3, **settings)


def test_larger_is_better_for_accuracy(tmp_path: Path) -> None:
    study = Study.open(str(tmp_path / "a"), SPACE, metric="accuracy", sampler="random")
    for value in (0.5, 0.9, 0.7):
        study.tell(study.ask().number, value)
    assert study.best is not None and study.best.value == 0.9
    assert [trial.number for trial in study.ranked()] == [1, 2, 0]


def test_trials_below_the_median_are_pruned(tmp_path: Path) -> None:
    study = Study.open(str(tmp_path / "a"), SPACE, pruner="median", sampler="random")
    for value in range(6):
        trial = study.ask()
        study.report(trial.number, 10, float(value))
        study.tell(trial.number, float(value))
    good, bad = study.ask().number, study.ask().number
    study.report(good, 10, 1.0)
    study.report(bad, 10, 9.0)
    assert not study.should_prune(good) and study.should_prune(bad)


def test_values_that_are_not_finite_do_no_harm(tmp_path: Path) -> None:
    study = Study.open(str(tmp_path / "a"), SPACE, sampler="random")
    number = study.ask().number
    study.report(number, 1, float("nan"))
    with pytest.raises(SearchError, match=r"search\.no-value.*the value nan"):
        study.tell(number, float("nan"))
    study.tell(number, 1.0)
    for wrong in (number, 7):
        with pytest.raises(SearchError, match=r"search\.other-trial"):
            study.tell(wrong, 1.0)
    assert [(trial.value, trial.values) for trial in study.trials()] == [(1.0, {})]


def test_a_name_may_have_any_characters_and_spaces_any_sequences(tmp_path: Path) -> None:
    for _ in range(2):
        study = Study.open(str(tmp_path / "what?x=1#y"), {"x": (1, 2, 3)})
        assert study.folder.database.exists() and study.size == 20


def test_facts_are_stored_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = Study.open(str(tmp_path / "a"), SPACE, sampler="random")
    number = study.ask().number
    writes = []
    write = study._storage.set_trial_user_attr
    monkeypatch.setattr(study._storage, "set_trial_user_attr", lambda *args: writes.append(args) or write(*args))
    study.update(number, rung=1, paused=False, completed_before=3)
    assert len(writes) == 1 and (study.trials()[0].rung, study.trials()[0].completed_before) == (1, 3)


def test_all_trials_failed(tmp_path: Path) -> None:
    study = Study.open(str(tmp_path / "a"), SPACE, sampler="random")
    study.require_success()
    study.update(study.ask().number, verdict="out of memory")
    study.tell(0, state="failed")
    with pytest.raises(SearchError, match=r"search\.all-failed.*out of memory"):
        study.require_success()


def test_a_study_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"search\.no-study"):
        Study.load(StudyFolder(tmp_path))
    with pytest.raises(SearchError, match=r"search\.no-space"):
        Study.open(str(tmp_path / "a"), {})
    with pytest.raises(SearchError, match=r"search\.no-value"):
        Study.open(str(tmp_path / "a"), SPACE).tell(0)
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"launch\.run-folder"):
        Study.open(str(tmp_path / "file" / "a"), SPACE)
    with pytest.raises(ConfigError, match=r"config\.unknown-key"):
        Study.open(str(tmp_path / "b"), SPACE, trails=1)
