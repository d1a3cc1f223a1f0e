from __future__ import annotations

from pathlib import Path

from paceline.config import files, show
from paceline.config.recipe import Config


def read_text(text: str, folder: Path) -> dict[str, object]:
    (folder / "shown.yaml").write_text(text)
    return files.read(folder / "shown.yaml")[0]


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
    assert [line.split("# ")[1] for line in lines if line.startswith("seed:")] == [f"{path}:2"]
    assert [line.split("# ")[1] for line in lines if line.startswith("strategy:")] == ["default"]
