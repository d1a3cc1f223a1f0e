from __future__ import annotations

from typing import Any

import pytest

from paceline.config.sections import SweepSection
from paceline.errors import SearchError
from paceline.run.study_folder import StudyFolder
from paceline.tools.search.space import Parameter, grid_cell, grid_size, parse_space, set_key, split_overrides
from paceline.tools.search.study import Study


@pytest.mark.parametrize(
    ("text", "kind", "values"),
    [
        ("log(1e-5,1e-2)", "log", (1e-5, 1e-2)),
        (" uniform( 0 , 0.5 ) ", "uniform", (0, 0.5)),
        ("int(64, 512, 64)", "int", (64, 512, 64)),
        ("logint(16,1024)", "logint", (16, 1024)),
        ("choice(adamw, sgd, [1, 2], null)", "choice", ("adamw", "sgd", [1, 2], None)),
        ([1, 2], "choice", (1, 2)),
    ],
)
def test_sets_of_values_are_read(text: Any, kind: str, values: tuple[Any, ...]) -> None:
    found = Parameter.parse("key", text)
    assert (found.kind, found.values) == (kind, values)


@pytest.mark.parametrize(
    "text",
    [
        "lgo(1, 2)",
        "choice()",
        "choice(1, 1)",
        "log(1e-2, 1e-5)",
        "log(0, 1)",
        "log(1, 2, 3)",
        "uniform(1, 1)",
        "uniform(0, .inf)",
        "uniform(0, 1, 2)",
        "int(1.5, 3)",
        "int(a, b)",
        "int(1)",
        "int(1, 8, 0)",
        "uniform([1, 2)",
        "just text",
        17,
    ],
)
def test_a_set_that_makes_no_sense_is_an_error(text: Any) -> None:
    with pytest.raises(SearchError, match=r"\[search\.bad-space\] Invalid search space: key: "):
        Parameter.parse("key", text)


def test_a_misspelled_function_has_a_suggestion() -> None:
    with pytest.raises(SearchError, match="did you mean 'choice'"):
        Parameter.parse("key", "chioce(1, 2)")


def test_overrides_are_told_from_the_space() -> None:
    plain, space = split_overrides(["recipe.yaml", "batch=32", "optimizer.lr=log(1e-5,1e-2)", "name=a(b"])
    assert plain == ["recipe.yaml", "batch=32", "name=a(b"]
    assert space == {"optimizer.lr": "log(1e-5,1e-2)"}


def test_a_grid_has_all_combinations_in_order() -> None:
    space = parse_space({"a": "choice(x, y)", "b": "int(1, 5, 2)", "c": "uniform(0, 0.3, 0.1)"})
    assert grid_size(space) == 2 * 3 * 4
    cells = [grid_cell(space, number) for number in range(24)]
    assert cells[0] == {"a": '"x"', "b": 1, "c": 0} and cells[-1]["a"] == '"y"'
    assert len({str(cell) for cell in cells}) == 24
    assert grid_size(parse_space({"a": "int(1, 1000000000)"})) == 10**9
    with pytest.raises(SearchError, match="a grid needs a list of values"):
        grid_size(parse_space({"a": "log(1, 2)"}))


def test_a_key_and_a_part_of_it_can_not_both_vary() -> None:
    with pytest.raises(SearchError, match=r"optimizer: optimizer\.lr is a part of it"):
        parse_space({"optimizer.lr": "log(1, 2)", "optimizer": ["sgd", "adamw"]})


def test_a_name_keeps_the_other_keys_of_its_section() -> None:
    recipe = {"optimizer": {"name": "adamw", "lr": 0.1}, "ema": 0.9}
    values = dict(recipe)
    set_key(values, ["optimizer"], "sgd")
    set_key(values, ["ema", "warmup"], False)
    set_key(values, ["model", "width"], 8)
    assert values == {
        "optimizer": {"name": "sgd", "lr": 0.1},
        "ema": {"decay": 0.9, "warmup": False},
        "model": {"width": 8},
    }
    assert recipe == {"optimizer": {"name": "adamw", "lr": 0.1}, "ema": 0.9}


def test_choices_of_any_type_survive_storage() -> None:
    parameter = Parameter.parse("betas", [[0.9, 0.98], [0.9, 0.999], None, True, 1, 1.0, "1", "a"])
    stored = list(parameter.distribution.choices)  # type: ignore[attr-defined]
    assert all(each is None or isinstance(each, (str, int, float, bool)) for each in stored)
    assert [repr(parameter.decode(each)) for each in stored] == [repr(each) for each in parameter.values]
    with pytest.raises(SearchError, match="can't be stored"):
        Parameter.parse("key", [object()])


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


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("cmaes", marks=pytest.mark.nightly)])
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
