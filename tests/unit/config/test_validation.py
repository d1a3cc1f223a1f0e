from __future__ import annotations

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError


def message_of(values: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(values)
    return f"{caught.value.code}: {caught.value}"


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    assert "did you mean 'batch'?" in message_of({"bach": 8})
    assert "did you mean 'epochs'?" in message_of({"train": {"epoch": 8}})
    assert "config.unknown-key" in message_of({"optimizer": {"learning_rate": 1e-3}})


@pytest.mark.parametrize(
    "values",
    [
        {"batch": "many"},
        {"batch": True},
        {"batch": 0},
        {"batch": 3.5},
        {"optimizer": {"name": "adams"}},
        {"schedule": {"warmup": -1}},
        {"schedule": 3},
        {"schedule": {"warmup": 1.5}},
        {"optimizer": {"lr": float("inf")}},
        {"train": "gpt"},
        {"env": {"A": True}},
        {"port": 70000},
    ],
)
def test_an_invalid_value_has_a_code_and_names_its_key(values: dict[str, object]) -> None:
    text = message_of(values)
    assert text.startswith("config.bad-value")
    assert next(iter(values)) in text


def test_a_bad_value_says_where_it_came_from_and_optional_sections_know_their_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"seed": "x"}, origin="my-recipe.yaml")
    assert "my-recipe.yaml" in str(caught.value) and "default" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"early_stop": {"metrics": "loss"}})
    assert "metric" in str(caught.value) and "did you mean" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"profile": 3})
    assert "profile.steps" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"optimizer": "admw"}, "did you mean 'adam' or 'adamw'?"),
        ({"loggers": ["tensorbord"]}, "did you mean 'tensorboard'?"),
        ({"strategy": "dpp"}, "did you mean 'ddp' or 'dp' or 'pp'?"),
        ({"precision": "float16"}, "did you mean 'fp16'?"),
        ({"precision": "16-mixed"}, "did you mean 'fp16'?"),
        ({"optimizer": {"lr": "fast"}}, "set optimizer.lr to a number"),
        ({"batch": 0}, "set batch to a value greater than 0"),
    ],
)
def test_the_fix_of_a_bad_value_is_the_value_that_was_meant(values: dict[str, object], fix: str) -> None:
    text = message_of(values)
    assert text.endswith(f"fix: {fix}") and "nput should" not in text and "loggers.0" not in text


def test_each_of_several_findings_has_its_own_fix() -> None:
    assert message_of({"bach": 8, "seeed": 1}).endswith(
        "fix: bach: did you mean 'batch'?\n    seeed: did you mean 'seed'?"
    )


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "fix: set sync.compress or sync.every, or remove sync"),
        ({"rank": 2}, "fix: set sync.compress: powersgd, or remove sync.rank"),
        ({"outer": "nesterov"}, "'sync.outer' is {'name': 'nesterov'} (the caller): has no effect without sync.every"),
        ({"compress": "gzip"}, "'sync.compress' is 'gzip'"),
        (
            {"compress": "int8", "rank": 2},
            "'sync.rank' is 2 (the caller): has no effect without sync.compress: powersgd",
        ),
        ({"compress": "int8", "warm_start": False}, "remove sync.warm_start"),
        ({"compress": "int8", "warmup": 5}, "'sync.warmup' is 5 (the caller): has no effect without sync.every"),
        ({"compress": "int8", "outer": "nesterov"}, "has no effect without sync.every"),
        (
            {"every": 4, "outer": {"lr": 0.5}},
            "'sync.outer.lr' is 0.5 (the caller): has no effect without sync.outer.name",
        ),
    ],
)
def test_a_key_of_sync_without_effect_is_refused(section: dict[str, object], said: str) -> None:
    assert said in message_of({"sync": section})


def test_an_effective_recipe_with_sync_is_valid_again() -> None:
    for section in (
        "int8",
        {"compress": "powersgd", "rank": 4},
        {"every": 4, "outer": {"name": "nesterov", "lr": 0.5}},
    ):
        config = Config.from_dict({"sync": section})
        assert Config.from_dict(config.to_dict()).sync == config.sync
