from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import SearchError
from paceline.run.study_folder import StudyFolder
from paceline.search.study import Study

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


def test_a_study_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SearchError, match=r"search\.no-study"):
        Study.load(StudyFolder(tmp_path))
    with pytest.raises(SearchError, match=r"search\.no-space"):
        Study.open(str(tmp_path / "a"), {})
    with pytest.raises(SearchError, match=r"search\.no-value"):
        Study.open(str(tmp_path / "a"), SPACE).tell(0)
