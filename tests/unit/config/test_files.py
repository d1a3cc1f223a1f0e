from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import files
from paceline.config.recipe import Config, effective
from paceline.errors import ConfigError


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
def test_an_invalid_override_has_a_code(override: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.bad-override"):
        Config.from_dict({"batch": 8}, [override])


def test_a_missing_file_has_a_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.missing-file"):
        Config.from_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "text", ["", "- a\n- b\n", "a: [1\n", "3: x\n", "a: !!python/object:os.system {}\n", "a: 1\na: 2\n"]
)
def test_a_malformed_file_has_a_code(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.malformed"):
        Config.from_file(path)


def test_a_malformed_toml_has_a_code(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("a = = 3")
    with pytest.raises(ConfigError, match=r"config\.malformed"):
        Config.from_file(path)


@pytest.mark.parametrize("override", ["seed=2024-13-45", "batch=[1"])
def test_an_override_that_is_not_yaml_has_a_code(override: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.malformed"):
        Config.from_dict({}, [override])


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("r.yaml", "seed: 1\n\noptimizer:\n  lr: 0.1\n  rate: 3\n", "r.yaml:5"),
        ("r.yaml", "a: &a {bacth: 3}\n", "r.yaml:1"),
        ("r.toml", "seed = 1\n[optimizer]\nlr = 0.1\nrate = 3\n", "r.toml:4"),
    ],
)
def test_an_error_names_the_line_of_the_key(tmp_path: Path, name: str, text: str, place: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{place}\)"):
        Config.from_file(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\n  batch: 8\n", "line 2 is indented differently from line 1"),
        ("ema: {decay: 0.9}\n  batch: 8\n", "line 2 is indented differently from line 1"),
        ("train:\n    epochs: 3\n\n  max_steps: 8\n", "line 4 is indented differently from line 2"),
        ("train:\n  epochs: 3: 4\n", "mapping values are not allowed here"),
        ('optimizer:\n  name: "sgd" x\n', "expected <block end>"),
    ],
)
def test_wrong_indentation_is_named_and_nothing_else_is_taken_for_it(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        Config.from_file(tmp_path / "r.yaml")


def test_a_recipe_with_too_many_values_is_refused_before_its_end_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(f"x: [{'1,' * 30_000}1] ]")
    with pytest.raises(ConfigError, match="more than 20000 values"):
        Config.from_file(tmp_path / "r.yaml")


def read_text(text: str, folder: Path) -> dict[str, object]:
    (folder / "shown.yaml").write_text(text)
    return files.read(folder / "shown.yaml")[0]


def test_show_reads_back_as_the_same_config(tmp_path: Path) -> None:
    odd = {"A": "x: y", "NO": "1e-3", "B": "on"}
    config = Config.from_dict({"model": {"name": "vae", "latent": 3}, "env": odd}, ["batch=4"])
    again = Config.from_dict(read_text(effective(config), tmp_path))
    assert again.to_dict() == config.to_dict()


def test_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("batch: 8\nseed: 3\n")
    lines = effective(Config.from_file(path, ["batch=16"])).splitlines()
    assert [line.split("# ")[1] for line in lines if line.startswith("batch:")] == ["override batch=16"]
    assert [line.split("# ")[1] for line in lines if line.startswith("seed:")] == [f"{path}:2"]
    assert [line.split("# ")[1] for line in lines if line.startswith("strategy:")] == ["default"]
