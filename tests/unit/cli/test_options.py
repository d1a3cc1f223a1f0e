"""Options of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.launch import warn_misplaced
from paceline.cli.main import app
from paceline.errors import ConfigError, LaunchError
from paceline.launcher.workload import Target


@pytest.mark.parametrize(
    ("command", "option", "ours"),
    [
        ("launch", "--num_gpus", "-n (or --ranks)"),
        ("launch", "--master_addr", "--master HOST:PORT"),
        ("train", "--nproc_per_node", "-n (or --ranks)"),
    ],
)
def test_an_option_of_another_launcher_names_ours(command: str, option: str, ours: str) -> None:
    error = CliRunner().invoke(app, [command, option, "2", "train.py"]).exception
    assert isinstance(error, LaunchError) and error.code == "launch.bad-options"
    assert option in error.what and ours in error.fix


def test_another_unknown_option_is_reported_by_typer() -> None:
    done = CliRunner().invoke(app, ["launch", "--rnk", "2", "train.py"])
    assert done.exit_code == 2 and "No such option: --rnk" in done.output


def test_options_after_the_script_are_warned_about_unless_the_script_knows_them(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr("paceline.log.warning", warned.append)
    Path("train.py").write_text("parser.add_argument('--nodes')")
    warn_misplaced(Target("script", "train.py", ("--nodes", "3", "--lr", "1")))
    assert warned == []
    warn_misplaced(Target("script", "train.py", ("-n", "2")))
    assert "-n is passed to train.py" in warned[0]


def test_a_script_is_not_a_recipe() -> None:
    error = CliRunner().invoke(app, ["train", "train.py"]).exception
    assert isinstance(error, ConfigError) and "paceline launch -n 2 train.py" in error.fix
