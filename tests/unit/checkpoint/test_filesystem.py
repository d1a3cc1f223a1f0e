"""The file operations of a save, and the disks that stand in for the real one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from disks import FailingDisk, RecordingDisk
from paceline.checkpoint.filesystem import Filesystem, write_all, write_new


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
