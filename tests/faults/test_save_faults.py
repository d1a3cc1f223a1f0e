"""A disk that fails: the old checkpoint stays good, the error has a code, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as torch_dist

from disks import FailingDisk
from faults import saves, write_faults
from faults.write_faults import NEW, OLD, TWO_ERRORS, WAYS, NotMounted, Optimist, Way
from paceline.checkpoint.local_store import Filesystem, LocalStore, locate
from paceline.checkpoint.writer import Description, Writer
from paceline.errors import CheckpointError
from paceline.testing import ranks

SMALL = 256 << 10


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_fault_at_any_call_leaves_a_good_checkpoint(way: Way, in_memory: Path) -> None:
    count = 0
    for fault in write_faults.faults(in_memory, TWO_ERRORS, [way]):
        count += 1
        assert write_faults.problem(in_memory / str(count), fault) is None, str(fault)
    assert count > 50


def test_an_error_in_the_background_arrives_with_the_result(tmp_path: Path) -> None:
    writer, disk = Writer(), FailingDisk("write", 2, 28)
    try:
        saving = writer.begin(
            locate(tmp_path / "step-000001", disk), saves.as_held(NEW), Description(1, 0, True), background=True
        )
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            saving.result()
    finally:
        writer.close()
    assert caught.value.code == "checkpoint.not-saved"
    assert list(tmp_path.iterdir()) == []


def test_a_fault_after_the_commit_does_not_deny_the_checkpoint(tmp_path: Path) -> None:
    def after(name: str) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(CheckpointError) as caught:
        saves.save(tmp_path, 1, NEW, after=after)
    assert caught.value.code == "checkpoint.not-tidied"
    assert write_faults.newest(tmp_path) == "new"


def test_a_save_that_would_not_fit_is_not_begun(tmp_path: Path) -> None:
    class Full(Filesystem):
        def free_bytes(self, path: Path) -> int:
            return 100

    with pytest.raises(CheckpointError) as caught:
        saves.save(tmp_path, 1, NEW, Full())
    assert caught.value.code == "checkpoint.no-space"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("disk", [Filesystem(), Optimist()], ids=["seen before", "found out in the middle"])
def test_a_disk_that_is_really_full_keeps_the_old_checkpoint(disk: Filesystem, tmp_path: Path) -> None:
    try:
        with write_faults.small_disk(tmp_path / "small", SMALL) as folder:
            saves.save(folder / "run", 1, OLD)
            filler = write_faults.fill(folder, 4096)
            with pytest.raises(CheckpointError) as caught:
                saves.save(folder / "run", 2, NEW, disk)
            assert caught.value.code in ("checkpoint.no-space", "checkpoint.not-saved")
            filler.unlink()
            assert write_faults.problem_in(folder / "run", ["old"]) is None
    except NotMounted as error:
        pytest.skip(f"no file system could be mounted: {error}")


def test_a_read_only_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    try:
        with write_faults.small_disk(tmp_path / "small", SMALL) as folder:
            saves.save(folder, 1, OLD)
            write_faults.make_read_only(folder)
            with pytest.raises(CheckpointError, match="Read-only file system"):
                saves.save(folder, 2, NEW)
            assert write_faults.newest(folder) == "old"
    except NotMounted as error:
        pytest.skip(f"no file system could be mounted: {error}")


def test_partial_folders_do_not_accumulate(tmp_path: Path) -> None:
    """A disk on which nothing can be removed, then one on which it can."""
    saves.save(tmp_path, 1, OLD)
    for call in range(1, 4):

        class Stubborn(FailingDisk):
            def remove(self, path: Path) -> None:
                raise OSError(5, "Input/output error")

        with pytest.raises(CheckpointError):
            saves.save(tmp_path, 2, NEW, Stubborn("write", call, 28))
    assert len(list(tmp_path.glob(".*"))) == 3
    LocalStore(tmp_path).remove_leftovers()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


@ranks(2)
def test_a_fault_on_one_rank_is_raised_on_every_rank_and_leaves_nothing_behind(tmp_path: Path) -> None:
    failing = torch_dist.get_rank() == 1
    disk, writer = FailingDisk("write", 2, 28) if failing else None, Writer(torch_dist.group.WORLD)
    held = saves.as_held(saves.on_two_ranks(NEW))
    with pytest.raises(CheckpointError, match="on rank 1: No space left on device"):
        writer.begin(locate(tmp_path / "step-000001", disk), held, Description(1, 0, True)).result()
    torch_dist.barrier()
    assert list(tmp_path.iterdir()) == []
