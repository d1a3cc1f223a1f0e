"""The run folder of a launch, and the logs of its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.local import rank_logs


@pytest.mark.parametrize(("log", "stays"), [("", False), ("precious", True)])
def test_after_an_error_only_an_unused_run_folder_is_removed(in_folder: Path, log: str, stays: bool) -> None:
    with pytest.raises(LaunchError), rank_logs.opened(LaunchSpec(run="mine")) as logs:
        logs.folder.rank_log(0).write_text(log)
        raise LaunchError("coordinator-lost", "The connection was lost.")
    assert Path("runs/mine/logs/rank-0.log").exists() == Path("runs/mine").exists() == stays
