from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import recipe_keys
from paceline.config.recipe import Config


def test_every_key_of_a_recipe_is_listed_with_type_default_and_meaning() -> None:
    keys = {key.name: key for key in recipe_keys.recipe_keys()}
    assert {name.partition(".")[0] for name in keys} == set(Config.model_fields)
    assert all(key.kind and key.help for key in keys.values())
    assert keys["log_every"].kind == "int" and keys["log_every"].default == "10"
    assert keys["schedule.name"].choices == ("constant", "linear", "cosine", "step", "wsd", "plateau")
    shown = recipe_keys.table(list(keys.values()))
    assert "\noptimizer:\n" in shown


def test_a_word_is_completed_to_recipes_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").touch()
    Path("script.py").touch()
    assert recipe_keys.complete("s")[-1] == "small.yaml" and "seed=" in recipe_keys.complete("s")
    assert recipe_keys.complete("schedule.na") == ["schedule.name="]
    assert recipe_keys.complete("nonfinite=") == ["nonfinite=raise", "nonfinite=skip", "nonfinite=stop"]
    assert recipe_keys.complete("tf32=") == ["tf32=true", "tf32=false"]


def test_the_shell_completes_without_importing_torch() -> None:
    code = """
import sys
sys.argv = ["paceline"]
from paceline.cli.main import app
try:
    app(prog_name="paceline")
finally:
    assert "torch" not in sys.modules
"""
    words = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": "paceline train precision=", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["precision=fp32", "precision=bf16", "precision=fp16", "precision=fp64"]
