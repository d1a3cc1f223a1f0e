"""The folder of checkpoints: names, order, pointers, and which of them go. Crashes are in tests/faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import saves
from paceline.checkpoint import local_store
from paceline.checkpoint.filesystem import Filesystem
from paceline.errors import CheckpointError


def fill(folder: Path, *steps: int) -> None:
    for step in steps:
        saves.save(folder, step, saves.values(step, rows=2))


def names(folder: Path) -> list[str]:
    return [found.folder.name for found in local_store.candidates(folder)]


def test_the_most_recently_saved_comes_first(tmp_path: Path) -> None:
    """A run that went back to an earlier step is newer than what it left."""
    fill(tmp_path, 10, 20, 15)
    assert names(tmp_path) == ["step-000015", "step-000020", "step-000010"]


def test_a_pointer_is_followed_to_its_first_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    local_store.write_pointer(Filesystem(), tmp_path, "best", ["step-000002", "step-000001"])
    assert local_store.follow_pointer(tmp_path / "best") == tmp_path / "step-000002"
    assert local_store.follow_pointer(tmp_path / "step-000001") == tmp_path / "step-000001"


@pytest.mark.parametrize("content", [None, "", "../elsewhere\n", "/etc\n"])
def test_a_pointer_that_leads_nowhere_has_a_code(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "latest").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        local_store.follow_pointer(tmp_path / "latest")
    assert caught.value.code == "checkpoint.no-pointer"


def test_no_folder_holds_no_checkpoints(tmp_path: Path) -> None:
    assert local_store.candidates(tmp_path / "none") == [] and list(local_store.verified(tmp_path / "none")) == []
    local_store.remove_leftovers(Filesystem(), tmp_path / "none")


def test_a_folder_that_is_not_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "latest").write_text("step-000001\n")
    (tmp_path / "linked").symlink_to(tmp_path / "step-000001")
    (tmp_path / ".step-000002.partial-12").mkdir()
    assert names(tmp_path) == ["step-000001"]


def test_a_damaged_one_is_listed_in_its_place_with_its_problem_and_is_not_good(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / "step-000002" / "rank-0.safetensors").unlink()
    found = local_store.candidates(tmp_path)
    assert [each.folder.name for each in found] == ["step-000002", "step-000001"]
    assert found[0].manifest is None and found[0].problem is not None
    assert [each.manifest.step for each in local_store.verified(tmp_path)] == [1]


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    assert saves.save(tmp_path, 1, saves.values(5), unique_name=True).name == "step-000001-2"
    assert saves.save(tmp_path, 1, saves.values(6), unique_name=True).name == "step-000001-3"


def test_a_committed_one_is_not_overwritten_unasked(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    before = (tmp_path / "step-000001" / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError) as caught:
        fill(tmp_path, 1)
    assert caught.value.code == "checkpoint.exists"
    assert (tmp_path / "step-000001" / "manifest.json").read_bytes() == before


def test_a_folder_that_is_not_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        saves.save(tmp_path, 1, saves.values(1), overwrite=True)
    assert (tmp_path / "step-000001" / "thesis.tex").exists()


def test_a_pointer_is_read_back_and_replaced(tmp_path: Path) -> None:
    assert local_store.read_pointer(tmp_path, "best") == []
    local_store.write_pointer(Filesystem(), tmp_path, "best", ["a", "b"])
    local_store.write_pointer(Filesystem(), tmp_path, "best", ["c"])
    assert local_store.read_pointer(tmp_path, "best") == ["c"]
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_pruning_spares_the_newest_the_best_and_every_so_many(tmp_path: Path) -> None:
    fill(tmp_path, 10, 15, 20, 25, 30)
    saves.save(tmp_path / "other", 1, saves.values(1, rows=2)).rename(tmp_path / "by-hand")
    local_store.write_pointer(Filesystem(), tmp_path, "best", ["step-000015"])
    gone = local_store.prune(Filesystem(), tmp_path, 2, 10)
    assert gone == ["step-000025"]
    assert sorted(names(tmp_path)) == ["by-hand", "step-000010", "step-000015", "step-000020", "step-000030"]


def test_one_that_was_moved_aside_without_a_successor_gets_its_name_back(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / ".step-000001.old-12ab")
    assert names(tmp_path) == [".step-000001.old-12ab"]
    local_store.remove_leftovers(Filesystem(), tmp_path)
    assert names(tmp_path) == ["step-000001"]


def test_a_partly_removed_checkpoint_is_ignored_and_deleted(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / "step-000001").rename(tmp_path / ".step-000001.gone-12ab")
    assert names(tmp_path) == ["step-000002"]
    local_store.remove_leftovers(Filesystem(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
