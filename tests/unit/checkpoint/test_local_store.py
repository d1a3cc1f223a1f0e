"""The folder of checkpoints: names, order, pointers, and which of them go. Crashes are in tests/faults."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from disks import FailingDisk, RecordingDisk
from faults import saves
from paceline.checkpoint.local_store import Filesystem, LocalStore, follow_pointer, new_file, write_all
from paceline.checkpoint.reader import candidates, verified
from paceline.checkpoint.writer import prune
from paceline.errors import CheckpointError


def fill(folder: Path, *steps: int) -> None:
    for step in steps:
        saves.save(folder, step, saves.values(step, rows=2))


def names(folder: Path) -> list[str]:
    return [found.at.name for found in candidates(LocalStore(folder))]


def test_the_most_recently_saved_comes_first(tmp_path: Path) -> None:
    """A run that went back to an earlier step is newer than what it left."""
    fill(tmp_path, 10, 20, 15)
    assert names(tmp_path) == ["step-000015", "step-000020", "step-000010"]


def test_a_pointer_is_followed_to_its_first_checkpoint(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    LocalStore(tmp_path).point("best", ["step-000002", "step-000001"])
    assert follow_pointer(tmp_path / "best") == tmp_path / "step-000002"
    assert follow_pointer(tmp_path / "step-000001") == tmp_path / "step-000001"


@pytest.mark.parametrize("content", [None, "", "../elsewhere\n", "/etc\n"])
def test_a_pointer_that_leads_nowhere_has_a_code(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "latest").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        follow_pointer(tmp_path / "latest")
    assert caught.value.code == "checkpoint.no-pointer"


def test_no_folder_holds_no_checkpoints(tmp_path: Path) -> None:
    assert candidates(LocalStore(tmp_path / "none")) == [] and list(verified(LocalStore(tmp_path / "none"))) == []
    LocalStore(tmp_path / "none").remove_leftovers()


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
    found = candidates(LocalStore(tmp_path))
    assert [each.at.name for each in found] == ["step-000002", "step-000001"]
    assert found[0].manifest is None and found[0].problem is not None
    assert [each.manifest.step for each in verified(LocalStore(tmp_path))] == [1]


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


def test_a_draft_is_where_it_was_begun_also_for_ranks_with_another_folder(tmp_path: Path) -> None:
    first, other = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    draft = first.create("step-000001", 1)
    with other.write(draft, "rank-1.safetensors") as write:
        write(memoryview(b"x"))
    first.commit(draft, {"manifest.json": b"{}"})
    assert sorted(path.name for path in (tmp_path / "a" / "step-000001").iterdir()) == [
        "manifest.json",
        "rank-1.safetensors",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_pointer_is_read_back_and_replaced(tmp_path: Path) -> None:
    assert LocalStore(tmp_path).pointer("best") == []
    LocalStore(tmp_path).point("best", ["a", "b"])
    LocalStore(tmp_path).point("best", ["c"])
    assert LocalStore(tmp_path).pointer("best") == ["c"]
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_pruning_spares_the_newest_the_best_and_every_so_many(tmp_path: Path) -> None:
    fill(tmp_path, 10, 15, 20, 25, 30)
    saves.save(tmp_path / "other", 1, saves.values(1, rows=2)).rename(tmp_path / "by-hand")
    LocalStore(tmp_path).point("best", ["step-000015"])
    gone = prune(LocalStore(tmp_path), 2, 10)
    assert gone == ["step-000025"]
    assert sorted(names(tmp_path)) == ["by-hand", "step-000010", "step-000015", "step-000020", "step-000030"]


def test_one_that_was_moved_aside_without_a_successor_gets_its_name_back(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / ".step-000001.old-12ab")
    assert names(tmp_path) == [".step-000001.old-12ab"]
    LocalStore(tmp_path).remove_leftovers()
    assert names(tmp_path) == ["step-000001"]


def test_a_partly_removed_checkpoint_is_ignored_and_deleted(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / "step-000001").rename(tmp_path / ".step-000001.gone-12ab")
    assert names(tmp_path) == ["step-000002"]
    LocalStore(tmp_path).remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


# The file operations of a save, and the disks that stand in for the real one.


def write_new(disk: Filesystem, path: Path, content: bytes) -> None:
    with new_file(disk, path) as write:
        write(memoryview(content))


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    write_new(Filesystem(), tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        write_new(Filesystem(), tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        write_new(Filesystem(), tmp_path / "link", b"x")
    assert not (tmp_path / "target").exists()


def test_short_writes_are_gone_on_with(tmp_path: Path) -> None:
    disk = FailingDisk("write", 1, None, lasting=True)
    write_new(disk, tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert disk.calls["write"] == 4  # 5, 3, 1 and 1 bytes


def test_a_disk_that_writes_nothing_is_an_error_and_no_endless_loop() -> None:
    class Stuck(Filesystem):
        def write(self, descriptor: int, data: memoryview) -> int:
            return 0

    with pytest.raises(OSError, match="no bytes were written"):
        write_all(Stuck(), -1, memoryview(b"x"))


def test_exchange_swaps_two_folders(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    if not Filesystem().exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system can't swap names")
    assert (tmp_path / "one" / "name").read_text() == "other"
    assert (tmp_path / "other" / "name").read_text() == "one"


def test_exchange_with_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError):
        Filesystem().exchange(tmp_path / "one", tmp_path / "other")


def test_removing_a_link_leaves_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    Filesystem().remove(tmp_path / "link")
    Filesystem().remove(tmp_path / "link")  # it is gone already
    assert (tmp_path / "folder").is_dir() and not (tmp_path / "link").is_symlink()


def test_a_recording_disk_writes_down_what_it_does(tmp_path: Path) -> None:
    disk = RecordingDisk()
    disk.make_folder(tmp_path / "a")
    write_new(disk, tmp_path / "a" / "file", b"xy")
    disk.sync_folder(tmp_path / "a")
    disk.rename(tmp_path / "a", tmp_path / "b")
    disk.remove(tmp_path / "b")
    steps = [(operation.kind, operation.path.name) for operation in disk.operations]
    assert steps == [
        ("make_folder", "a"), ("create", "file"), ("write", "file"), ("sync", "file"), ("close", "file"),
        ("sync_folder", "a"), ("rename", "a"), ("unlink", "file"), ("remove_folder", "b"),
    ]  # fmt: skip
    assert disk.operations[2].data == b"xy" and disk.operations[6].other == tmp_path / "b"
    assert list(tmp_path.iterdir()) == []


def test_a_recording_disk_can_lack_the_exchange(tmp_path: Path) -> None:
    disk = RecordingDisk(can_exchange=False)
    assert not disk.exchange(tmp_path, tmp_path) and disk.operations == []


@pytest.mark.parametrize(("lasting", "after"), [(True, errno.EIO), (False, None)])
def test_a_failing_disk_fails_once_or_from_then_on(lasting: bool, after: int | None, tmp_path: Path) -> None:
    disk = FailingDisk("make_folder", 2, errno.EIO, lasting=lasting)
    seen = []
    for name in "abc":
        try:
            disk.make_folder(tmp_path / name)
            seen.append(None)
        except OSError as error:
            seen.append(error.errno)
    assert seen == [None, errno.EIO, after]
