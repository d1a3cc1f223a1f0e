"""The effective recipe of a run."""

from __future__ import annotations

from pathlib import Path

from paceline.config.recipe import Config
from paceline.config.show import effective
from paceline.watch.run_recipe import recipe_rows, recipe_value
from watched import run_folder


def test_every_key_with_its_origin(tmp_path: Path) -> None:
    config = Config.from_dict({"batch": 8, "model": "gpt"}, ["optimizer.lr=0.5"], origin="recipe.yaml")
    rows = {
        key: (value, origin) for key, value, origin in recipe_rows(run_folder(tmp_path / "r", config=effective(config)))
    }
    assert rows["batch"] == ("8", "recipe.yaml") and rows["optimizer.lr"] == ("0.5", "override optimizer.lr=0.5")
    assert rows["tf32"] == ("false", "default") and rows["sync"] == ("null", "default")


def test_recipes_that_cannot_be_read(tmp_path: Path) -> None:
    assert recipe_rows(run_folder(tmp_path / "a", config="[1, 2")) == []
    folder = run_folder(tmp_path / "b", config="seed: 1\n")
    assert recipe_value(folder, "seed") == 1 and recipe_value(folder, "batch") is None
    folder.config.unlink()
    (tmp_path / "secret.yaml").write_text("seed: 7\n")
    folder.config.symlink_to(tmp_path / "secret.yaml")
    assert recipe_rows(folder) == [] and recipe_value(folder, "seed") is None
