"""Logs of ranks on a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.run.folder import RunFolder
from paceline.watch import log_search
from paceline.watch.log_search import log_lines


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    lines = [f"line {n}" for n in range(1, 1001)]
    folder.rank_log(3).write_text("\n".join([*lines, "    x \x1b[31mERROR\x1b[0m  y", "10%\r50%\r100%"]) + "\n")
    return folder


def test_the_last_lines(folder: RunFolder) -> None:
    found = log_lines(folder, 3, most=3)
    assert found["lines"] == [(1000, "line 1000"), (1001, "    x ERROR  y"), (1002, "100%")]
    assert found["found"] == 1002 and found["skipped"] == 0 and found["problem"] is None


def test_lines_that_contain_a_text(folder: RunFolder) -> None:
    assert log_lines(folder, 3, "error")["lines"] == [(1001, "    x ERROR  y")]
    found = log_lines(folder, 3, "line 99", most=2)
    assert found["lines"] == [(998, "line 998"), (999, "line 999")] and found["found"] == 11
    assert log_lines(folder, 3, "nowhere")["lines"] == []


def test_of_a_long_log_the_end_is_read(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_search, "_TAIL_BYTES", 100)
    found = log_lines(folder, 3)
    assert 0 < len(found["lines"]) < 15 and found["skipped"] > 0
    assert log_lines(folder, 3, "line 1")["lines"][0] == (1, "line 1")


def test_missing_logs_and_links(folder: RunFolder, tmp_path: Path) -> None:
    assert log_lines(folder, 0)["problem"] == "rank-0.log: No such file or directory"
    folder.rank_log(1).symlink_to("/etc/passwd")
    assert "symbolic link" in log_lines(folder, 1)["problem"] and log_lines(folder, 1)["lines"] == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "logs").symlink_to(folder.logs)
    assert log_lines(RunFolder(tmp_path / "other"), 3)["lines"] == []
