from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.train.trainer_kwargs import TrainerKwargs


def test_an_empty_section_is_an_empty_section() -> None:
    assert Config.from_dict({"train": None}, ["train.epochs=3"]).train.epochs == 3
    assert Config.from_dict({"schedule": None}).schedule.name == "constant"


def test_numbers_become_text_where_they_are_for_the_environment() -> None:
    assert Config.from_dict({"env": {"A": 3}}, ["env.B=4"]).env == {"A": "3", "B": "4"}


def test_python_code_may_write_tuples() -> None:
    assert Config.from_dict({"optimizer": {"betas": (0.9, 0.95)}}).optimizer.betas == [0.9, 0.95]


def test_a_config_made_in_python_has_codes_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batch'"):
        Config(bach=3)  # type: ignore[call-arg]


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().batch = 3  # type: ignore[misc]


def test_every_key_that_the_schema_lists_with_a_description_is_json() -> None:
    assert "batch" in json.loads(json.dumps(Config.json_schema()))["properties"]


def test_the_trainers_keywords_are_the_recipes_top_level_keys() -> None:
    # Left out: sections that a recipe needs and a Trainer is given as objects, and what only a launcher reads.
    not_for_trainer = {"model", "optimizer", "train", "launch", "device", "env", "port"}
    assert set(TrainerKwargs.__annotations__) == set(Config.model_fields) - not_for_trainer


def test_every_shipped_recipe_is_valid() -> None:
    recipes = sorted(Path(__file__).parents[3].glob("recipes/*.yaml"))
    assert len(recipes) >= 4
    for path in recipes:
        Config.from_file(path)
    Config.default()
