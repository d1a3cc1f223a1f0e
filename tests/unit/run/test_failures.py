"""Failure records, and the logs beside them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError, LaunchError
from paceline.launcher.workload import Target
from paceline.run import failures
from paceline.run.failures import FailureRecord
from paceline.run.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path)
    made.logs.mkdir()
    return made


def test_a_traceback_begins_at_the_users_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that the launcher runs: its own frames come first, then those of runpy."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "train.py"
    script.write_text("def fail():\n    raise ValueError('the user\\'s own')\n\nfail()\n")
    with pytest.raises(ValueError) as caught:
        Target("script", str(script)).run()
    launched = caught.value.with_traceback(caught.tb.tb_next)  # without this test's frame
    assert "launcher" in str(launched.__traceback__.tb_frame.f_code.co_filename)
    text = failures.describe(launched, rank=2).text
    assert text.splitlines()[1].startswith(f'  File "{script}", line 4')
    assert "launcher" not in text and "runpy" not in text
    assert text.endswith("ValueError: the user's own\n")


def test_a_recorded_error_is_restored(folder: RunFolder) -> None:
    failures.describe(ConfigError("type", "Wrong.", why="because", fix="do"), rank=1).write(folder)
    failures.describe(ZeroDivisionError("division by zero"), rank=2).write(folder)
    records = failures.read(folder)
    coded, other = records[1].as_error(), records[2].as_error()
    assert isinstance(coded, ConfigError) and (coded.code, coded.fix) == ("config.type", "do")
    assert isinstance(other, LaunchError) and "ZeroDivisionError" in other.what
    assert failures.first_coded(folder) == records[1]


def test_a_record_names_the_users_line() -> None:
    with pytest.raises(ConfigError) as coded:
        Config(batches=3)
    record = failures.describe(coded.value, rank=1)
    assert record.place.endswith(": Config(batches=3)") and record.log_text.endswith(f"\n  at: {record.place}\n")
    assert coded.value.code in str(error := record.as_error()) and error.__notes__ == [f"on rank 1, at {record.place}"]
    with pytest.raises(ZeroDivisionError) as own:
        1 / 0  # noqa: B018
    record = failures.describe(own.value, rank=1)
    assert ": 1 / 0" in record.place and record.code_line.partition("  #")[0] == "1 / 0"


def test_a_start_removes_what_its_own_ranks_left(folder: RunFolder) -> None:
    for rank in range(4):
        FailureRecord(rank, 0.0, 1, "failed").write(folder)
        folder.heartbeat(rank).touch()
        folder.suspects(rank).touch()
        folder.rank_log(rank).write_text("stays")
    failures.clear(folder, [1, 2], everything=False)
    for files in (folder.failure, folder.heartbeat, folder.suspects):
        assert list(files.existing()) == [0, 3]
    failures.clear(folder, [1, 2], everything=True)
    assert list(failures.read(folder)) == [0] and len(folder.rank_log.existing()) == 4


def test_the_tail_of_a_log_is_what_came_after_an_earlier_start(folder: RunFolder) -> None:
    folder.rank_log(0).write_text("before\n")
    since = failures.log_sizes(folder)[0]
    folder.rank_log(0).write_text("before\none\ntwo\nthree\n")
    assert failures.tail(folder, 0, lines=2, since=since) == "two\nthree"
    assert failures.tail(folder, 0, since=since) == "one\ntwo\nthree"
    assert failures.tail(folder, 7) == ""


def test_the_tail_of_a_crash_keeps_the_lines_of_the_users_code(folder: RunFolder, tmp_path: Path) -> None:
    stack = [f'  File "{os.__file__}", line {number} in run' for number in range(30)]
    own = f'  File "{tmp_path / "train.py"}", line 17 in main'
    said = ["terminate called", "Fatal Python error: Aborted"]
    folder.rank_log(0).write_text("\n".join([*said, "", "Thread 0x0 (most recent call first):", *stack, own, *stack]))
    assert failures.tail(folder, 0).splitlines() == [*said, own]
    threads = ["", "Thread 0x1 (most recent call first):", *stack, "", "Current thread 0x2 (most recent call first):"]
    folder.rank_log(0).write_text("\n".join([*said, *threads, *stack, own]))
    crashed = "in the thread that crashed, innermost call first:"
    assert failures.tail(folder, 0).splitlines() == [*said, crashed, *stack[:5], own]
