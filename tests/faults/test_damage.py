"""No damage loads silently. `python benchmarks/checkpoint_damage.py` does 10,000 of them, and the hostile ones."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from faults import damages, hostile
from faults.damages import ANY_FOLDER, OURS, Copy
from paceline.checkpoint import reader
from paceline.checkpoint.local_store import locate
from paceline.errors import CheckpointError
from paceline.run import regular_files
from samples import sample

CASES_OF_EACH = sample(15, 30)
Made = tuple[Copy, dict[str, bytes]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    ours, _, original = damages.make(tmp_path_factory.mktemp("made"))
    return ours, original


@pytest.mark.parametrize("kind", [*ANY_FOLDER, *OURS])
def test_damage_is_refused_with_a_code(kind: str, made: Made, in_memory: Path) -> None:
    copy, original = made
    damage = {**ANY_FOLDER, **OURS}[kind]
    for case in range(CASES_OF_EACH):
        damaged = damages.damaged_copy(copy, in_memory / str(case) / copy.folder.name)
        damage(damaged, random.Random(case))
        assert damages.outcome(damaged.folder, original) in ("refused", "equal"), f"case {case}"


def test_damage_is_named_by_file_tensor_and_place(made: Made, tmp_path: Path) -> None:
    copy, _ = made
    damaged = damages.damaged_copy(copy, tmp_path / copy.folder.name)
    chunk = reader.open_checkpoint(locate(copy.folder)).manifest.tensors["model/half"].chunks[1]
    path = damaged.folder / chunk.file
    data = bytearray(path.read_bytes())
    data[chunk.at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"model/half in {chunk.file}, block at byte {chunk.at}"):
        reader.verify(locate(damaged.folder))


@pytest.mark.parametrize("name", hostile.SPECIAL)
def test_a_hostile_folder_does_no_harm(name: str, made: Made, in_memory: Path) -> None:
    assert hostile.run(*made, in_memory, hostile.SPECIAL[name]).problem() is None


def test_hostile_values_do_no_harm(made: Made, in_memory: Path) -> None:
    for number in range(sample(20, 40)):
        result = hostile.run(*made, in_memory, hostile.random_case(number))
        assert result.problem() is None, f"random {number}"


def test_a_read_outside_of_the_folder_would_be_seen(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof that the watch bites: a reader that follows links."""
    monkeypatch.setattr(os, "O_NOFOLLOW", 0)
    monkeypatch.setattr(regular_files, "_require", lambda path, found: None)
    result = hostile.run(*made, tmp_path, hostile.SPECIAL["a linked shard"])
    assert set(result.outside) == {str(tmp_path / "hostile" / "secret")}
