"""Checkpoints of ranks that can't see the run folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as torch_dist

from faults import saves
from hiding import a_folder_to_hide, hide
from paceline import dist
from paceline.checkpoint import transfer
from paceline.checkpoint.local_store import Filesystem, locate, new_file
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import verify
from paceline.checkpoint.writer import Description, Writer
from paceline.errors import CheckpointError
from worlds import ranks, run_on_ranks


def tensors() -> dict[str, LocalShard]:
    """Each rank holds some of its own; the last one spans several blocks."""
    torch.manual_seed(dist.rank())
    own = {f"model/{dist.rank()}/{n}": LocalShard(torch.randn(n + 1, 3)) for n in range(3)}
    large = torch.arange(2_500_000, dtype=torch.int64)
    return {**own, f"model/{dist.rank()}/large": LocalShard(large)}


def test_a_rank_that_does_not_see_the_folder_saves_and_loads(tmp_path: Path) -> None:
    folder = a_folder_to_hide(tmp_path)
    run_on_ranks(2, lambda: save_and_load(folder))


def save_and_load(folder: Path) -> None:
    if dist.rank() == 1:
        hide(folder)
    group = torch_dist.group.WORLD
    writer = Writer(group, without_access=[1])
    for step, background in ((1, False), (2, True)):
        path = folder / f"step-{step:06d}"
        writer.begin(locate(path), tensors(), Description(step, 0, True), background=background).result()
        assert path.exists() == (dist.rank() == 0)
        with transfer.fetch(locate(path), group, [1]) as local:
            loaded = saves.read_full(verify(local), "model/")
        assert Path(str(local)).exists() == (dist.rank() == 0)
        for name, held in tensors().items():
            assert torch.equal(loaded[name.removeprefix("model/")], held.local)
    writer.close()


class FullDisk(Filesystem):
    """Takes rank 0's own file, and no more than the beginning of the other."""

    def __init__(self) -> None:
        self.files = 0

    def create(self, path: Path) -> int:
        self.files += 1
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.files == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data)


@ranks(2)
def test_a_disk_that_is_full_while_receiving_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    group = torch_dist.group.WORLD
    writer = Writer(group, without_access=[1])
    with pytest.raises(CheckpointError, match=r"not-saved.*rank 0.*No space left"):
        writer.begin(locate(tmp_path / "step-000001", FullDisk()), tensors(), Description(1, 0, True)).result()
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    writer.close()
    fine = Writer(group, without_access=[1])  # the group is not out of step
    fine.begin(locate(tmp_path / "step-000001"), tensors(), Description(1, 0, True)).result()
    fine.close()


@ranks(2)
def test_a_sender_that_breaks_off_is_named(tmp_path: Path) -> None:
    group = torch_dist.group.WORLD

    if dist.rank() == 1:
        with pytest.raises(ValueError, match="no more"), transfer.sending(group) as write:
            write(memoryview(b"some"))
            raise ValueError("no more")
    else:
        with pytest.raises(OSError, match="rank 1 of the group failed to send"):
            transfer.receive_file(group, 1, new_file(Filesystem(), tmp_path / "file"))


@ranks(3)
def test_a_fetch_that_fails_on_one_rank_fails_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = torch_dist.group.WORLD
    with (
        pytest.raises(CheckpointError, match=r"checkpoint.missing"),
        transfer.fetch(locate(tmp_path / "step-000001"), group, [1]),
    ):
        pass
    Writer(group).begin(locate(tmp_path / "step-000001"), tensors(), Description(1, 0, True)).result()
    if dist.rank() == 2:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with (
        pytest.raises(CheckpointError, match=r"checkpoint.not-fetched.*rank 2: No such file"),
        transfer.fetch(locate(tmp_path / "step-000001"), group, [1, 2]),
    ):
        pass
