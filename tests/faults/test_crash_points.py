"""A crash at any moment of a save leaves a good checkpoint. `python benchmarks/crash_points.py` makes thousands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from faults import random_kills, saves
from faults.peers import Paceline
from faults.saves import Recorded
from samples import sample

RANDOM_ONES = sample(12, 25)


def problems(recorded: Recorded, root: Path, random_ones: int = RANDOM_ONES) -> list[str]:
    found = []
    for number, (prefix, state) in enumerate(saves.crashes(recorded, random_ones, seed=11)):
        problem = saves.problem_after(recorded, prefix, state, root / str(number))
        if problem is not None:
            found.append(f"after {prefix} operations: {problem}")
    return found


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    return {recorded.name: recorded for recorded in saves.record_all(tmp_path_factory.mktemp("recorded"))}


@pytest.mark.parametrize(
    "name",
    [
        "first save",
        "second save",
        "save with keep=1",
        "overwrite, exchanged",
        "overwrite, two renames",
        "two ranks, keep=1",
    ],
)
def test_a_crash_at_any_operation_leaves_a_good_checkpoint(
    name: str, recordings: dict[str, Recorded], in_memory: Path
) -> None:
    assert problems(recordings[name], in_memory) == []


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_a_save_that_forgets_to_sync_is_found_out(
    forgotten: str, recordings: dict[str, Recorded], in_memory: Path
) -> None:
    """The proof that the states bite."""
    whole = recordings["save with keep=1"]
    kept = [operation for operation in whole.operations if operation.kind != forgotten]
    committed = sum(operation.kind != forgotten for operation in whole.operations[: whole.committed])
    assert problems(replace(whole, operations=kept, committed=committed), in_memory) != []


def test_a_save_that_removes_the_old_one_first_is_found_out(recordings: dict[str, Recorded], in_memory: Path) -> None:
    whole = recordings["overwrite, two renames"]
    removals = [op for op in whole.operations if op.kind in ("unlink", "remove_folder")]
    moved = next(op for op in whole.operations if op.kind == "rename")
    assert moved.other is not None
    early = [replace(op, path=moved.path / op.path.relative_to(moved.other)) for op in removals]
    rest = [op for op in whole.operations if op not in removals and op is not moved]
    assert problems(replace(whole, operations=[*early, *rest]), in_memory) != []


@pytest.mark.parametrize("over_old", [True, False])
def test_a_save_that_is_killed_at_a_random_moment_leaves_a_good_checkpoint(over_old: bool) -> None:
    counts = random_kills.kill_saves(Paceline(), sample(3, 6), over_old=over_old, tensors=2, seed=11)
    assert counts["mixture"] == 0
    assert not over_old or counts["nothing"] == 0
