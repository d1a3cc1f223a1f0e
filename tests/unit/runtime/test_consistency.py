from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import WorldError
from paceline.runtime.consistency import by_rank, require_same_recipe, require_same_versions, require_same_weights


def error_of(require: Any, *arguments: Any) -> WorldError:
    with pytest.raises(WorldError) as caught:
        require(*arguments)
    return caught.value


def test_equal_values_pass() -> None:
    recipe = {"batch": 8, "optimizer": {"lr": 0.1}}
    require_same_recipe([recipe, dict(recipe)])
    require_same_versions([{"torch": "2.9"}] * 3)
    require_same_weights([{"w": 1}, {"w": 1}])


def test_a_recipe_that_differs_names_the_key_and_the_ranks_with_each_value() -> None:
    recipes = [{"batch": 8, "optimizer": {"lr": lr}} for lr in (0.1, 0.2, 0.1)]
    error = error_of(require_same_recipe, recipes)
    assert error.code == "world.different-recipes"
    text = str(error)
    assert "optimizer.lr" in text and "batch" not in text
    assert "ranks 0, 2: 0.1" in text and "rank 1: 0.2" in text


def test_a_key_that_only_some_ranks_have_differs() -> None:
    assert "(not set)" in str(error_of(require_same_versions, [{"torch": "2.9", "ray": "2"}, {"torch": "2.9"}]))


def test_weights_name_a_few_parameters_and_count_all() -> None:
    names = [f"layer.{number:02}" for number in range(20)]
    error = error_of(require_same_weights, [dict.fromkeys(names, 1), dict.fromkeys(names, 2)])
    assert error.code == "world.different-weights"
    assert "20 differences" in str(error) and "layer.07" in str(error) and "layer.08" not in str(error)


def test_ranks_with_the_same_value_share_a_line() -> None:
    assert by_rank(["a", "b", "a"], indent="") == "ranks 0, 2: a\nrank 1: b"
