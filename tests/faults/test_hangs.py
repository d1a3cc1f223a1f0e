"""A rank that comes to a standstill is named, with the collective that others wait in and the lines of both."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny  # noqa: F401  # once, before launchers are forked
from faults import hangs
from faults.hangs import Plan
from paceline.launcher.local import agent as _agent  # noqa: F401

HANGS = [
    (Plan("sleep", 0, "ddp", ranks=2, victims=(1,), step=8, site="data"), "in sleep() at hanging.py:"),
    (Plan("sigstop", 0, "fsdp", ranks=2, victims=(0,), step=12, site="forward"), "stopped by a signal (SIGSTOP)"),
    (Plan("gil", 0, "pp", ranks=2, victims=(1,), step=20, site="callback"), "holding the GIL, in hold_the_gil()"),
    (Plan("skipped", 0, "ddp", ranks=3, victims=(2,), step=9, site="", operations=("all_gather",)), "all_gather"),
    (Plan("nobody-waits", 0, "fsdp", ranks=2, victims=(0, 1), step=10, site="data"), "ranks 0 and 1"),
]


@pytest.mark.parametrize(("plan", "words"), HANGS, ids=lambda each: each.kind if isinstance(each, Plan) else "")
def test_the_rank_the_collective_and_both_lines_are_named(plan: Plan, words: str, tmp_path: Path) -> None:
    result = hangs.run(plan, tmp_path)
    assert result.is_right, f"{result.problem}\n{result.text}"
    assert words in result.text
