from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    not_for_trainer = {"model", "optimizer", "metrics", "train", "launch", "device", "env", "port", "sweep"}
    assert set(TrainerKwargs.__annotations__) == set(Config.model_fields) - not_for_trainer


def test_every_shipped_recipe_is_valid() -> None:
    recipes = sorted(Path(__file__).parents[3].glob("recipes/*.yaml"))
    assert len(recipes) >= 4
    for path in recipes:
        Config.from_file(path)
    Config.default()


SHORT: list[tuple[str, Any, Any]] = [
    ("model", "mlp", {"name": "mlp"}),
    ("data", "shapes", {"name": "shapes"}),
    ("optimizer", "sgd", {"name": "sgd"}),
    ("schedule", "cosine", {"name": "cosine"}),
    ("ema", 0.5, {"decay": 0.5}),
    ("save_best", "accuracy", {"metric": "accuracy"}),
    ("early_stop", 7, {"patience": 7}),
    ("profile", [2, 4], {"steps": [2, 4]}),
    ("loggers", "csv", ["csv"]),
    ("blocks", "layers", ["layers"]),
    ("launch", {"tee": 0}, {"tee": [0]}),
]


@pytest.mark.parametrize(("key", "short", "full"), SHORT, ids=[each[0] for each in SHORT])
def test_a_short_form_means_the_same_in_a_recipe_an_override_and_python(
    key: str, short: Any, full: Any, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{key}: {short}")
    wanted = Config.from_dict({key: full}).to_dict()
    for made in (Config.from_file(path), Config.from_dict({}, [f"{key}={short}"]), Config(**{key: short})):
        assert made.to_dict() == wanted


def test_a_short_form_is_completed_by_overrides_and_has_an_origin() -> None:
    config = Config.from_dict({"schedule": "cosine"}, ["schedule.warmup=5", "ema=0.5", "ema.warmup=false"])
    assert (config.schedule.name, config.schedule.warmup) == ("cosine", 5)
    assert config.ema is not None and (config.ema.decay, config.ema.warmup) == (0.5, False)
    assert config.origin("schedule.name") == "the caller" and config.origin("ema.decay") == "override ema=0.5"
    assert Config.from_dict({"ema": 0.5, "profile": True}, ["ema=false"]).ema is None
