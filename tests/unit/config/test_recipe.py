from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import files, show
from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.train.trainer_kwargs import TrainerKwargs


def code_of(values: object = None, overrides: list[str] | None = None, path: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        if path is not None:
            Config.from_file(path, overrides or [])
        else:
            Config.from_dict(values or {}, overrides or [])  # type: ignore[arg-type]
    return f"{caught.value.code}: {caught.value}"


def read_text(text: str, folder: Path) -> dict[str, object]:
    (folder / "shown.yaml").write_text(text)
    return files.read(folder / "shown.yaml")


def test_yaml_and_toml_give_the_same_config(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("batch: 8\noptimizer: {lr: 1e-3}\nmodel: {name: mlp, width: 16}\n")
    (tmp_path / "a.toml").write_text('batch = 8\n[optimizer]\nlr = 1e-3\n[model]\nname = "mlp"\nwidth = 16\n')
    assert Config.from_file(tmp_path / "a.yaml").to_dict() == Config.from_file(tmp_path / "a.toml").to_dict()


def test_overrides_win_and_are_typed() -> None:
    config = Config.from_dict({"batch": 8}, ["batch=16", "optimizer.lr=1e-3", "model.name=mlp", "quiet=true"])
    assert (config.batch, config.optimizer.lr, config.model.name, config.quiet) == (16, 1e-3, "mlp", True)


def test_override_of_a_whole_section() -> None:
    config = Config.from_dict({"train": {"epochs": 3}}, ["train={max_steps: 5}"])
    assert (config.train.epochs, config.train.max_steps) == (None, 5)


@pytest.mark.parametrize("override", ["batch", "=3", "batch..x=3", "batch.size=3"])
def test_an_override_that_is_none_has_a_code(override: str) -> None:
    assert "config.bad-override" in code_of({"batch": 8}, [override])


def test_an_empty_section_is_an_empty_section() -> None:
    assert Config.from_dict({"train": None}, ["train.epochs=3"]).train.epochs == 3
    assert Config.from_dict({"schedule": None}).schedule.name == "constant"


def test_numbers_become_text_where_they_are_for_the_environment() -> None:
    assert Config.from_dict({"env": {"A": 3}}, ["env.B=4"]).env == {"A": "3", "B": "4"}


def test_python_code_may_write_tuples() -> None:
    assert Config.from_dict({"optimizer": {"betas": (0.9, 0.95)}}).optimizer.betas == [0.9, 0.95]


def test_unknown_keys_are_refused_with_the_nearest_known() -> None:
    assert "did you mean 'batch'?" in code_of({"bach": 8})
    assert "did you mean 'epochs'?" in code_of({"train": {"epoch": 8}})
    assert "config.unknown-key" in code_of({"optimizer": {"learning_rate": 1e-3}})


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
        {"model": "gpt"},
        {"env": {"A": True}},
        {"port": 70000},
    ],
)
def test_bad_values_have_a_code_and_name_their_key(values: dict[str, object]) -> None:
    text = code_of(values)
    assert text.startswith("config.bad-value")
    assert next(iter(values)) in text


def test_a_missing_file_has_a_code(tmp_path: Path) -> None:
    assert "config.missing-file" in code_of(path=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "text", ["", "- a\n- b\n", "a: [1\n", "3: x\n", "a: !!python/object:os.system {}\n", "a: 1\na: 2\n"]
)
def test_a_malformed_file_has_a_code(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert "config.malformed" in code_of(path=path)


def test_a_malformed_toml_has_a_code(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("a = = 3")
    assert "config.malformed" in code_of(path=path)


@pytest.mark.parametrize("override", ["seed=2024-13-45", "batch=[1"])
def test_an_override_that_can_not_be_read_has_a_code(override: str) -> None:
    assert "config.malformed" in code_of({}, [override])


def test_a_config_made_in_python_has_codes_too() -> None:
    with pytest.raises(ConfigError, match="did you mean 'batch'"):
        Config(bach=3)  # type: ignore[call-arg]


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().batch = 3  # type: ignore[misc]


def test_show_reads_back_as_the_same_config(tmp_path: Path) -> None:
    odd = {"A": "x: y", "NO": "1e-3", "B": "on"}
    config = Config.from_dict({"model": {"name": "vae", "latent": 3}, "env": odd}, ["batch=4"])
    again = Config.from_dict(read_text(show.effective(config), tmp_path))
    assert again.to_dict() == config.to_dict()


def test_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("batch: 8\nseed: 3\n")
    lines = show.effective(Config.from_file(path, ["batch=16"])).splitlines()
    assert [line.split("# ")[1] for line in lines if line.startswith("batch:")] == ["override batch=16"]
    assert [line.split("# ")[1] for line in lines if line.startswith("seed:")] == [str(path)]
    assert [line.split("# ")[1] for line in lines if line.startswith("strategy:")] == ["default"]


def test_every_key_that_the_schema_lists_with_a_description_is_json() -> None:
    assert "batch" in json.loads(json.dumps(Config.json_schema()))["properties"]


def test_the_trainers_keywords_are_the_recipes_top_level_keys() -> None:
    # Left out: sections that a recipe needs and a Trainer is given as objects, and what only a launcher reads.
    not_for_trainer = {"model", "data", "optimizer", "train", "launch", "device", "env", "port"}
    assert set(TrainerKwargs.__annotations__) == set(Config.model_fields) - not_for_trainer


def test_every_shipped_recipe_is_valid() -> None:
    recipes = sorted(Path(__file__).parents[3].glob("recipes/*.yaml"))
    assert len(recipes) >= 4
    for path in recipes:
        Config.from_file(path)
    Config.default()


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
