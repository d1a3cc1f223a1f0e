from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.run import regular_files
from paceline.run.folder import RunFolder


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A pipe that blocks must not block the tests."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def make(kind: str, path: Path, victim: Path) -> None:
    if kind == "a symbolic link":
        path.symlink_to(victim)
    elif kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif os.geteuid():
        pytest.skip("creating a device requires root")
    else:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero


@pytest.mark.parametrize("kind", ["a symbolic link", "a named pipe", "a folder", "a device"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, os.O_RDWR | os.O_CREAT])
def test_only_regular_files_are_opened(kind: str, flags: int, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    make(kind, tmp_path / "ledger.jsonl", victim)
    with pytest.raises(OSError, match=f"ledger.jsonl is {kind}"):
        regular_files.open_descriptor(tmp_path / "ledger.jsonl", flags)
    assert victim.read_text() == "mine"


def test_a_dangling_link_is_not_created(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match="symbolic link"):
        regular_files.open_descriptor(tmp_path / "metrics.jsonl", os.O_WRONLY | os.O_CREAT)
    assert not (tmp_path / "nothing").exists()


def test_replacing_a_link_leaves_its_target_alone(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "config.yaml").symlink_to(tmp_path / "victim")
    regular_files.replace(tmp_path / "config.yaml", b"new")
    assert regular_files.read_text(tmp_path / "config.yaml") == "new"
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_failed_replacement_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("old")
    with pytest.raises(ZeroDivisionError), regular_files.replacing(tmp_path / "config.yaml") as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "config.yaml").read_text() == "old"


@pytest.mark.parametrize("name", ["events", "checkpoints", "config.yaml", "logs/rank-3.log", "checkpoints/latest"])
def test_a_run_folder_with_a_link_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{name} is a symbolic link") as caught:
        regular_files.require_regular(RunFolder(tmp_path / "run"))
    assert caught.value.code == "checkpoint.not-regular"


def test_a_run_folder_on_another_disk_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "logs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    regular_files.require_regular(RunFolder(tmp_path / "runs"))


def test_hard_links_of_a_backup_are_separated(tmp_path: Path) -> None:
    folder, backup = RunFolder(tmp_path / "run"), tmp_path / "backup"
    folder.path.mkdir()
    folder.metrics.write_text("old\n")
    os.link(folder.metrics, backup)
    regular_files.unlink_copies(folder)
    with folder.metrics.open("a") as file:
        file.write("new\n")
    assert backup.read_text() == "old\n"
    assert folder.metrics.read_text() == "old\nnew\n"
