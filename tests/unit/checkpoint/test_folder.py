from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.folder import Snapshot, read, write
from paceline.errors import CheckpointError


def snapshot() -> Snapshot:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.8, 0.9))
    weight.sum().backward()
    optimizer.step()
    weights = {"w": weight.detach(), "same": weight.detach()}
    return Snapshot(5, 2, weights, optimizer.state_dict(), "AdamW", {"a": [1]})


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    before = snapshot()
    write(tmp_path / "c", before)
    after = read(tmp_path / "c")
    assert (after.step, after.epoch, after.optimizer_kind, after.metadata) == (5, 2, "AdamW", {"a": [1]})
    assert torch.equal(after.model["w"], before.model["w"])
    assert before.optimizer is not None and after.optimizer is not None
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    optimizer.load_state_dict(dict(after.optimizer))
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before.optimizer["state"][0]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_committed_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "c", snapshot())
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path / "c", snapshot())
    assert caught.value.code == "checkpoint.exists"


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path / "c", Snapshot(1, 0, {"w": torch.ones(1)}, metadata={"a": object()}))
    assert caught.value.code == "checkpoint.not-saved"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["model", "state", "optimizer", "format"])
def test_damage_has_a_code(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "c", snapshot())
    path = tmp_path / "c" / ("state.json" if damage in {"state", "format"} else f"{damage}.safetensors")
    if damage == "format":
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path / "c")
    assert caught.value.code == ("checkpoint.other-format" if damage == "format" else "checkpoint.damaged")
