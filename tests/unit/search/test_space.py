from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import SearchError
from paceline.search.space import Parameter, grid_cell, grid_size, parse_space, set_key, split_overrides


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
