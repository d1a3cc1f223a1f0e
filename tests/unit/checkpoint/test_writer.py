from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from disks import FailingDisk
from faults import saves
from paceline.checkpoint.local_store import locate
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.writer import Description, Writer
from paceline.errors import CheckpointError


def description(step: int) -> Description:
    return Description(step=step, epoch=0, optimizer=False)


def test_a_background_save_has_the_values_of_when_it_began(tmp_path: Path) -> None:
    weight, buffer = torch.ones(1000), torch.ones(3)
    tensors = {"model/w": LocalShard(weight), "model/b": LocalShard(buffer)}
    writer = Writer()
    for step in (1, 2):
        saving = writer.begin(
            locate(tmp_path / f"step-{step}"), tensors, description(step), volatile=["model/b"], background=True
        )
        buffer.add_(1)
        saving.wait_for_copy()
        weight.add_(1)
        committed = saving.result()
        assert saving.is_done
        assert committed.bytes == sum(file.stat().st_size for file in (tmp_path / f"step-{step}").glob("*.safetensors"))
        saved = saves.read_full(open_checkpoint(committed.at), "model/")
        assert torch.equal(saved["w"], torch.full((1000,), float(step)))
        assert torch.equal(saved["b"], torch.full((3,), float(step)))
    writer.close()


def test_a_tensor_that_is_new_in_a_later_save_is_saved(tmp_path: Path) -> None:
    writer = Writer()
    first = {"model/w": LocalShard(torch.ones(2))}
    writer.begin(locate(tmp_path / "a"), first, description(1)).result()
    writer.begin(locate(tmp_path / "b"), {**first, "model/v": LocalShard(torch.zeros(5))}, description(2)).result()
    writer.close()
    assert sorted(saves.read_full(open_checkpoint(locate(tmp_path / "b")), "model/")) == ["v", "w"]


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_the_error_of_that_save_only(tmp_path: Path, background: bool) -> None:
    tensors = {"model/w": LocalShard(torch.ones(2))}
    writer, disk = Writer(), FailingDisk("write", call=1, error=errno.ENOSPC)
    failed = writer.begin(locate(tmp_path / "a", disk), tensors, description(1), background=background)
    with pytest.raises(CheckpointError):
        failed.result()
    writer.close()
    assert not (tmp_path / "a").exists()


def test_a_name_that_is_taken_gets_a_number_where_that_is_asked_for(tmp_path: Path) -> None:
    tensors = {"model/w": LocalShard(torch.ones(2))}
    writer = Writer()
    places = [locate(tmp_path / "a")] * 2
    names = [writer.begin(at, tensors, description(1), unique_name=True).result().at.name for at in places]
    writer.close()
    assert names == ["a", "a-2"] and sorted(path.name for path in tmp_path.iterdir()) == names
