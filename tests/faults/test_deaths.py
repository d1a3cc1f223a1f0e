"""Each of the eighteen deaths is named as what it was, on the rank that died, and leaves nothing behind."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from faults import cgroups, deaths


@pytest.mark.parametrize("death", deaths.ALL, ids=str)
def test_a_death_is_named_and_nothing_is_left(tmp_path: Path, death: deaths.Death) -> None:
    with cgroups.required() if death.kind == "oom-killer" else nullcontext("") as cgroup:
        outcome = deaths.run(death, deaths.paceline(death.ranks), tmp_path, cgroup)
    assert deaths.problem(death, outcome) == "", outcome.said
