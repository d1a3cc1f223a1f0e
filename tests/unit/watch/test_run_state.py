"""Whether runs are running, and how they ended."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ledgers import Line
from paceline.run import ledger
from paceline.run.folder import RunFolder
from paceline.run.lock import RunLock
from paceline.watch.run_state import RunState, find_state
from watched import FAILED, FINISHED, HOSTILE, START, run_folder

LAUNCHED = FINISHED[0]


def state(folder: RunFolder) -> str:
    return str(find_state(folder, ledger.events(folder)))


def ended(status: Any) -> Line:
    return (START + 8, "ended", {"status": status})


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (FINISHED, "finished"),
        (FINISHED[:3], "finished"),
        (FAILED, "failed (exception)"),
        (FAILED[:3], "failed (exception)"),
        ((LAUNCHED, ended(143)), "interrupted"),
        ((LAUNCHED, ended(7)), "failed (exit status 7)"),
        ((LAUNCHED, ended("x" * 1000)), f"failed (exit status {'x' * 47}…)"),
        ((*FAILED[:3], (START + 6, "launched", {"generation": 1}), ended(0)), "finished"),
        ((*FAILED, (START + 7, "launched", {"generation": 0})), "interrupted"),
        ((LAUNCHED,), "interrupted"),
        ((), "unknown (no ledger)"),
        (((START, "stepped", {"step": 1}),), "unknown"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, events: tuple[Line, ...], expected: str) -> None:
    assert state(run_folder(tmp_path, events=events)) == expected


def test_a_run_that_starts_has_no_lock_yet(tmp_path: Path) -> None:
    assert state(run_folder(tmp_path, events=[(time.time() - 3, "launched", {})])) == "running (starting)"
    assert not RunFolder(tmp_path).lock.exists()


def test_a_run_whose_lock_is_held_is_running(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, events=[LAUNCHED])
    lock = RunLock(folder)
    lock.take()
    try:
        assert state(folder) == "running"
        hung = [{"time": START, "event": "launched"}, {"time": START, "event": "hang"}]
        assert str(find_state(folder, hung)) == "running (hung)"
    finally:
        lock.release()
    assert state(folder) == "interrupted"


def test_a_copied_run_may_still_run_elsewhere(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, events=[LAUNCHED])
    folder.lock.write_text(json.dumps({"host": "node7", "pid": 3, "since": "2026"}))
    assert state(folder) == "unknown (last seen running on node7)"


def test_a_cause_from_elsewhere_is_cleaned() -> None:
    assert str(RunState("failed", HOSTILE)) == "failed (abcd e[bold]<script>alert(1)</script>)"
