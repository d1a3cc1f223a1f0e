"""Ranks that are killed in a save, and checkpoints that are written while the weights change.

A core of what `python benchmarks/save_kills.py` goes through.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import bits, kills, worlds
from faults.kills import Kill, Unbroken
from paceline.train.checkpointing import saver


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Unbroken]:
    return {each: kills.unbroken(tmp_path_factory.mktemp(each), each) for each in ("ddp", "fsdp")}


LATER = pytest.mark.nightly
# Each phase once, and ranks, layouts and ways to save in turn. What a crash at any operation leaves behind is tested in
# test_crash_points.py, so some of the phases are enough for the run that resumes.
CORE = [
    pytest.param("before it begins", 1, "ddp", True, marks=LATER),
    pytest.param("folder made", 0, "fsdp", True, marks=LATER),
    pytest.param("in the middle of writing", 0, "ddp", True, marks=LATER),
    ("in the middle of writing", 1, "fsdp", False),
    ("before ranks tell what they wrote", 1, "ddp", False),
    pytest.param("after all have told it", 1, "fsdp", True, marks=LATER),
    pytest.param("manifest written", 0, "ddp", False, marks=LATER),
    ("before it gets its name", 0, "fsdp", True),
    pytest.param("it has its name", 0, "fsdp", False, marks=LATER),
    ("latest moved", 0, "ddp", True),
    pytest.param("the old one half removed", 0, "fsdp", True, marks=LATER),
]


@pytest.mark.parametrize(("phase", "rank", "strategy", "background"), CORE)
def test_after_a_kill_in_a_save_the_run_resumes_exactly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unbroken: dict[str, Unbroken],
    phase: str,
    rank: int,
    strategy: str,
    background: bool,
) -> None:
    monkeypatch.setattr(saver, "_ON_ERROR_SECONDS", 0.2)  # nobody comes
    kill = Kill(next(each for each in kills.PHASES if each.name == phase), rank, strategy, background)
    assert kills.problem_after(kill, tmp_path, unbroken[strategy]) == ""


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_holds_its_step_while_training_continues(tmp_path: Path, late: bool) -> None:
    def body() -> list[dict[str, str]]:
        if late:
            bits.copy_at_the_last_moment()
        return bits.train(tmp_path, 20, 384)

    noted = worlds.values(1, body)[0]
    assert len(noted) == 20 and bits.wrong_ones(tmp_path, noted) == []
