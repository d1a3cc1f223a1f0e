"""Each of the eighteen deaths is named as what it was, on the rank that died, and leaves nothing behind. One of each
kind is part of `make test`.

The launcher is forked from this process, in which torch is there already; `benchmarks/deaths.py` starts it anew.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

import nodes
from faults import cgroups, deaths

FIRST = {death.way: death for death in reversed(deaths.ALL)}.values()


@pytest.mark.parametrize(
    "death",
    [death if death in FIRST else pytest.param(death, marks=pytest.mark.nightly) for death in deaths.ALL],
    ids=str,
)
def test_a_death_is_named_and_nothing_is_left(tmp_path: Path, death: deaths.Death) -> None:
    before = deaths.shared_memory()
    with (
        cgroups.required() if death.kind == "oom-killer" else nullcontext("") as cgroup,
        nodes.launchers(tmp_path) as launch,
    ):
        launcher = launch(
            "launch", "-n", str(death.ranks), *deaths.command(death),
            enter=lambda: os.environ.update({"SMALL_CGROUP": cgroup}),
        )  # fmt: skip
        status = launcher.end()  # and all that belongs to it is gone
    left = deaths.left_in_shared_memory(before)
    assert deaths.problem(death, deaths.Outcome(status, launcher.said, left)) == "", launcher.said
