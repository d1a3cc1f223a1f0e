from __future__ import annotations

from typing import Any

import pytest

from paceline.config.sections import SweepSection
from paceline.run.study_folder import StudyFolder
from paceline.search.study import Study

SPACE = {"lr": "log(1e-5, 1e-2)", "width": "int(16, 128, 16)", "name": "choice(a, b)"}


def asked(folder: Any, number: int, **settings: Any) -> list[dict[str, Any]]:
    study = Study.open(str(folder), SPACE, trials=number, **settings)
    while not study.is_full:
        trial = study.ask()
        study.tell(trial.number, trial.params["lr"])
    return [dict(trial.params) for trial in study.trials()]


def test_trials_of_a_random_search_depend_on_seed_and_number_only(tmp_path: Any) -> None:
    first = asked(tmp_path / "a", 6, sampler="random")
    study = Study.open(str(tmp_path / "b"), SPACE, trials=6, sampler="random")
    for _ in range(6):
        study.ask()  # no result is known
    assert [dict(trial.params) for trial in study.trials()] == first
    assert len({each["lr"] for each in first}) == 6
    assert asked(tmp_path / "c", 6, sampler="random", seed=1) != first


def test_a_grid_is_walked_once(tmp_path: Any) -> None:
    study = Study.open(str(tmp_path / "a"), {"a": [1, 2], "b": [3, 4]}, trials=50, sampler="grid")
    while not study.is_full:
        study.tell(study.ask().number, 0.0)
    assert [tuple(each.params.values()) for each in study.trials()] == [(1, 3), (1, 4), (2, 3), (2, 4)]


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_samplers_learn_from_results(tmp_path: Any, sampler: str) -> None:
    """The parabola's minimum is found; random search needs more trials for that."""
    space = {"x": "uniform(-1, 1)", "y": "uniform(-1, 1)"}

    def best(name: str) -> float:
        study = Study.open(str(tmp_path / name), space, trials=40, sampler=name)
        while not study.is_full:
            trial = study.ask()
            study.tell(trial.number, (trial.params["x"] - 0.3) ** 2 + (trial.params["y"] + 0.6) ** 2)
        late = sorted(trial.value or 0.0 for trial in study.trials()[20:])
        return late[len(late) // 2]

    assert best(sampler) < best("random") / 2


def test_paused_trials_count_for_a_sampler(tmp_path: Any) -> None:
    study = Study.open(str(tmp_path / "a"), {"x": "uniform(-1, 1)"}, trials=40, sampler="tpe", pruner="asha")
    for _ in range(40):
        trial = study.ask()
        study.report(trial.number, 1, trial.params["x"] ** 2)
        study.update(trial.number, paused=True)
    assert {each.state for each in study.trials()} == {"paused"}
    later = sorted(abs(each.params["x"]) for each in study.trials()[30:])
    assert later[5] < 0.25  # 0.5 without what is known
    assert Study.load(StudyFolder(tmp_path / "a")).section == SweepSection(
        space={"x": "uniform(-1, 1)"}, trials=40, sampler="tpe", pruner="asha"
    )
