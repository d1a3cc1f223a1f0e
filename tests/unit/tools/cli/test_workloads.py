"""What a script says about its run before it is launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked
from paceline.config.recipe import Config
from paceline.errors import ConfigError, LaunchError
from paceline.launcher.workload import Target
from paceline.tools.cli import workloads
from paceline.tools.cli.workloads import read_recipe, require_script, warn_misplaced_options

SCRIPT = """
import torch, paceline
from torch import nn
torch.manual_seed(0)
batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(2)]
trainer = paceline.Trainer(nn.Linear(3, 1), criterion=nn.MSELoss(), run="mine", resume="auto", device="cpu")
trainer.train(batches, max_steps=trainer.step_count + 1)
"""


def test_a_launch_and_a_plain_process_train_in_one_folder(in_folder: Path) -> None:
    Path("train.py").write_text(SCRIPT)
    launched = forked.paceline("launch", "-n", "1", "--cpu", "train.py", cwd=in_folder)
    assert launched.returncode == 0, launched.stdout + launched.stderr
    done = forked.script(in_folder / "train.py", cwd=in_folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resuming runs/mine from step-000001" in done.stdout
    assert [path.name for path in Path("runs").iterdir()] == ["mine"]
    assert Path("runs/mine/logs/rank-0.log").is_file()


def test_options_after_the_script_are_warned_about_unless_the_script_knows_them(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr("paceline.log.warning", warned.append)
    Path("train.py").write_text("parser.add_argument('--nodes')")
    warn_misplaced_options(Target("script", "train.py", ("--nodes", "3", "--lr", "1")))
    assert warned == []
    warn_misplaced_options(Target("script", "train.py", ("-n", "2")))
    assert "-n is passed to train.py" in warned[0]


def test_a_script_is_not_a_recipe() -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(["train.py"], None)
    assert "paceline launch -n 2 train.py" in caught.value.fix


@pytest.mark.parametrize(("name", "words"), [("recipe.yaml", "paceline train recipe.yaml"), (".", "folder")])
def test_a_recipe_or_a_folder_is_not_a_script(name: str, words: str, in_folder: Path) -> None:
    Path("recipe.yaml").write_text("batch: 8")
    with pytest.raises(LaunchError, match=words) as caught:
        require_script(Target("script", name))
    assert caught.value.code == "launch.no-script"
    Path("__main__.py").touch()
    require_script(Target("script", "."))


def test_every_key_of_a_recipe_is_listed_with_type_default_and_meaning() -> None:
    keys = {key.name: key for key in workloads.recipe_keys()}
    assert {name.partition(".")[0] for name in keys} == set(Config.model_fields)
    assert all(key.kind and key.help for key in keys.values())
    assert keys["log_every"].kind == "int" and keys["log_every"].default == "10"
    assert keys["schedule.name"].choices == ("constant", "linear", "cosine", "step", "wsd", "plateau")
    shown = workloads.table(list(keys.values()))
    assert "\noptimizer:\n" in shown


def test_a_word_is_completed_to_recipes_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").touch()
    Path("script.py").touch()
    assert workloads.complete("s")[-1] == "small.yaml" and "seed=" in workloads.complete("s")
    assert workloads.complete("schedule.na") == ["schedule.name="]
    assert workloads.complete("nonfinite=") == ["nonfinite=raise", "nonfinite=skip", "nonfinite=stop"]
    assert workloads.complete("tf32=") == ["tf32=true", "tf32=false"]


def test_the_shell_completes_without_importing_torch() -> None:
    code = """
import sys
sys.argv = ["paceline"]
from paceline.tools.cli.main import app
try:
    app(prog_name="paceline")
finally:
    assert "torch" not in sys.modules
"""
    words = {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": "paceline train precision=", "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **words}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["precision=fp32", "precision=bf16", "precision=fp16", "precision=fp64"]
