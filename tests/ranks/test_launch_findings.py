"""What two cold reviews of the launcher found, each as a test that failed before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import nodes
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.cluster import channel
from paceline.launcher.local import rank_logs
from paceline.runtime import environment


def launched(folder: Path, script: str, *options: str) -> tuple[int, str]:
    (folder / "script.py").write_text(script)
    with nodes.launchers(folder) as launch:
        launcher = launch("launch", "-n", "2", *options, "script.py")
        return launcher.end(), launcher.said


def test_ranks_that_leave_without_a_word_are_not_waited_for(tmp_path: Path) -> None:
    assert launched(tmp_path, "import os\nos._exit(0)") == (0, "ranks: 2 (as asked); logs in runs/script/logs\n")


def test_what_an_earlier_start_said_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    script = """
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("of the first start")
if os.environ["RANK"] == "1":
    os._exit(9)
"""
    status, said = launched(tmp_path, script, "--max-restarts", "1")
    assert status == 9 and "rank 1 exited with status 9" in said and "first start" not in said.rpartition("fix")[0]


def test_a_node_rank_without_nodes_does_not_train_alone(tmp_path: Path) -> None:
    status, said = launched(tmp_path, "print('hello')", "--node-rank", "1")
    assert status == 2 and "[launch.bad-number]" in said and "hello" not in said


def test_a_run_folder_that_holds_something_is_never_removed(in_folder: Path) -> None:
    for name, content in (("empty", ""), ("full", "precious")):
        with pytest.raises(LaunchError), rank_logs.opened(LaunchSpec(run=name)) as logs:
            logs.folder.rank_log(0).write_text(content)
            raise LaunchError("coordinator-lost", "The connection was lost.")
    assert not Path("runs/empty").exists() and Path("runs/full/logs/rank-0.log").exists()


def test_a_variable_reaches_the_ranks_and_the_token_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.TOKEN, "a token of sixteen letters")
    assert channel.job_token() == "a token of sixteen letters" and environment.TOKEN not in os.environ
    status, said = launched(tmp_path, "import os; print(os.environ['OTHER'])", "--env", "OTHER=a b;c")
    assert (status, said.splitlines()[1]) == (0, "a b;c")


def test_an_empty_token_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.TOKEN, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".paceline" / "token"
    assert len(channel.job_token()) == 64 and path.stat().st_mode & 0o777 == 0o600
    path.write_text("")
    with pytest.raises(LaunchError, match=r"launch\.open-token"):
        channel.job_token()
