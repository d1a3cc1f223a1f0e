"""Options of the command line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from paceline.errors import LaunchError
from paceline.tools.cli.main import app


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


def test_a_word_where_a_number_is_expected_is_refused_in_plain_words() -> None:
    error = CliRunner().invoke(app, ["launch", "-n", "all", "train.py"]).exception
    assert isinstance(error, LaunchError) and error.what == "-n expects a number, got 'all'."
    assert error.fix == "omit it for one rank per GPU, or pass a number: -n 2"
