"""Scripts of other frameworks and what they become: those that need no other framework run here, `make migrations`
runs the others."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import forked
from paceline import Config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "migrate"
RUN = [FOLDER / "before_ddp.py", *sorted(FOLDER.glob("after_*.py"))]


@pytest.fixture(scope="module")
def migrations() -> Any:
    spec = importlib.util.spec_from_file_location("migrations", ROOT / "benchmarks" / "migrations.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", RUN, ids=lambda path: path.stem)
def test_a_script_runs_on_two_ranks_and_learns(script: Path, tmp_path: Path) -> None:
    if script.stem == "after_spawn":  # starts its ranks itself
        done = forked.script(script, cwd=tmp_path)
    else:
        done = forked.paceline("launch", "-n", "2", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    kind, value = re.findall(r"^(?:epoch \d+: )?(accuracy|loss) ([\d.]+)", done.stdout, re.M)[-1]
    assert float(value) > 0.9 if kind == "accuracy" else float(value) < 0.3


def test_the_recipe_that_replaces_a_config_of_torchtitan_is_valid() -> None:
    config = Config.from_file(FOLDER / "after_torchtitan.yaml")
    assert (config.layout.shard, config.layout.tensor, config.batch) == ("auto", 2, 32)


@pytest.mark.nightly
def test_the_recipe_that_replaces_a_config_of_torchtitan_trains(tmp_path: Path) -> None:
    done = forked.paceline("train", str(FOLDER / "after_torchtitan.yaml"), "-n", "4", "train.max_steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"layout +shard=2 tensor=2", done.stdout)
    assert re.search(r"accumulate +4 ", done.stdout)  # 32 = 4 samples × 4 micro-batches × 2 data ranks


def test_every_script_has_its_pair() -> None:
    assert {path.stem.removeprefix("before_") for path in FOLDER.glob("before_*")} == {
        path.stem.removeprefix("after_") for path in FOLDER.glob("after_*")
    }


def test_the_pages_have_the_scripts_as_they_are_and_their_numbers_of_lines(migrations: Any) -> None:
    pages = "".join(path.read_text() for path in migrations.PAGES)
    for name in migrations.NAMES:
        assert f"```diff\n{migrations.difference(name)}\n```" in pages, "python benchmarks/migrations.py --write-docs"
        assert migrations.row(name, [])[:-5] in pages
    assert {*migrations.NAMES} == {path.stem.removeprefix("before_") for path in FOLDER.glob("before_*.py")} - {
        "torchtitan"
    }
