"""Where a launch keeps the logs of its ranks, and what it tells them about the run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.launch import LaunchSpec
from paceline.errors import CheckpointError, LaunchError
from paceline.launcher.local.start import open_logs, shared_logs
from paceline.run.folder import RunFolder
from paceline.run.lock import RunLock


def test_a_named_launch_logs_into_a_new_run_folder(in_folder: Path) -> None:
    for name in ("gpt", "gpt-2"):
        with open_logs(LaunchSpec(run="gpt")) as logs:
            path = in_folder / "runs" / name
            assert logs.folder == logs.run == RunFolder(path)
            assert logs.environment == {"PACELINE_PROGRESS": str(path), "PACELINE_RUN": str(path)}
            assert logs.of_rank(1) == f"runs/{name}/logs/rank-1.log"


def test_a_launch_without_a_name_leaves_nothing(in_folder: Path) -> None:
    with open_logs(LaunchSpec(run=None)) as logs:
        assert logs.folder.logs.is_dir() and logs.of_rank(0) == ""
        assert logs.environment == {"PACELINE_PROGRESS": str(logs.folder)}
    assert not logs.folder.path.exists() and list(in_folder.iterdir()) == []


@pytest.mark.parametrize(("log", "stays"), [("", False), ("precious", True)])
def test_after_an_error_only_an_unused_run_folder_is_removed(in_folder: Path, log: str, stays: bool) -> None:
    with pytest.raises(LaunchError), open_logs(LaunchSpec(run="mine")) as logs:
        logs.folder.rank_log(0).write_text(log)
        raise LaunchError("coordinator-lost", "The connection was lost.")
    assert Path("runs/mine/logs/rank-0.log").exists() == Path("runs/mine").exists() == stays


def test_a_resumed_launch_appends_to_the_logs_of_its_run_unless_another_job_uses_it(in_folder: Path) -> None:
    run = RunFolder.create("gpt")
    run.config.touch()
    for resume in ("auto", "runs/gpt", "runs/gpt/checkpoints"):
        run.checkpoints.mkdir(exist_ok=True)
        with open_logs(LaunchSpec(run="gpt", resume=resume)) as logs:
            assert logs.folder == run
    lock = RunLock(run)
    lock.take()
    with pytest.raises(CheckpointError, match="run-in-use"), open_logs(LaunchSpec(run="gpt", resume="auto")):
        pass
    lock.release()


def test_a_node_logs_into_the_first_nodes_folder_or_a_temporary_one(tmp_path: Path) -> None:
    with shared_logs(str(tmp_path / "run")) as logs:
        assert logs.folder == logs.run == RunFolder(tmp_path / "run") and logs.folder.logs.is_dir()
    (tmp_path / "file").touch()
    elsewhere = RunFolder(tmp_path / "file" / "run")
    with shared_logs(str(elsewhere)) as logs:
        assert logs.run == elsewhere and logs.folder != elsewhere and logs.folder.logs.is_dir()
    assert not logs.folder.path.exists()


def test_an_error_of_a_node_is_not_taken_for_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the network is gone"), shared_logs(str(tmp_path / "run")):
        raise OSError("the network is gone")
