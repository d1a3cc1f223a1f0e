"""Checkpoints of trainings on a GPU: the copy runs on a stream of its own, into pinned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.checkpoint import host_copy
from paceline.checkpoint.checkpoint_store import step_name
from paceline.checkpoint.host_copy import HostCopy
from paceline.checkpoint.local_store import LocalStore
from paceline.checkpoint.planner import LocalShard, plan_save
from paceline.checkpoint.reader import candidates
from paceline.checkpoint.shard_file import bytes_of, lay_out

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu")


class Scaled(nn.Module):
    """With dropout, a batch norm, and a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 256), nn.BatchNorm1d(256), nn.Linear(256, 1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.relu(self.norm(self.first(inputs))), 0.1, self.training)
        result: torch.Tensor = self.last(hidden) * self.scale.exp()
        return result


def points() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(256, 32, generator=draw), torch.randn(256, 1, generator=draw))


def trainer(optimizer: dict[str, Any], device: str = "cuda", **settings: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = Scaled().to(device)
    made = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    options = {"criterion": nn.MSELoss(), "batch": 32, "quiet": True, "ema": 0.9, "device": device, **settings}
    return paceline.Trainer(model, made, **options)


@pytest.mark.parametrize("optimizer", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_resumed_run_continues_with_the_same_bits(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    whole = trainer(optimizer, run=str(tmp_path / "a"), save_every=1, keep=None)
    expected = whole.train(points(), max_steps=12).losses
    assert len(candidates(LocalStore(tmp_path / "a" / "checkpoints"))) == 12
    for step in (3, 7):
        again = trainer(optimizer, run=False, resume=str(tmp_path / "a" / "checkpoints" / step_name(step)))
        assert again.train(points(), max_steps=12).losses == expected[step:]
        theirs = whole.state_dict()
        assert [name for name, tensor in again.state_dict().items() if not torch.equal(tensor, theirs[name])] == []


def test_a_checkpoint_moves_between_gpu_and_cpu(tmp_path: Path) -> None:
    first = trainer({}, run=False)
    first.train(points(), max_steps=4)
    first.save_checkpoint(tmp_path / "gpu")
    second = trainer({}, "cpu", run=False)
    second.load_checkpoint(tmp_path / "gpu")
    second.train(points(), max_steps=8)
    second.save_checkpoint(tmp_path / "cpu")
    third = trainer({}, run=False)
    third.load_checkpoint(tmp_path / "cpu")
    assert third.step_count == 8
    assert all(
        torch.equal(a.cpu(), b) for a, b in zip(third.model.parameters(), second.model.parameters(), strict=True)
    )
    third.train(points(), max_steps=9)


def test_a_copy_has_the_state_of_its_step_although_nothing_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors span several pieces of page-locked memory; small ones are concatenated on the GPU first."""
    monkeypatch.setattr(host_copy, "PIECE", 8 << 20)
    draw = torch.Generator("cuda").manual_seed(0)
    tensors = {
        "weights": torch.randn(3000, 5001, device="cuda", generator=draw),
        "half": torch.randn(77, 4097, device="cuda", generator=draw).bfloat16(),
        "images": torch.randn(64, 64, 33, 9, device="cuda", generator=draw).to(memory_format=torch.channels_last),
        "frozen": torch.randn(1500, 4000, device="cuda", generator=draw),
        "step": torch.tensor(3.0, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        **{f"mean{n}": torch.randn(n, device="cuda", generator=draw) for n in range(1, 160)},
        "flags": torch.tensor([True, False, True], device="cuda"),
        "host": torch.arange(7),
    }
    layout = lay_out(plan_save({name: LocalShard(tensor) for name, tensor in tensors.items()}, None))
    expected = {name: bytes_of(tensor.cpu().contiguous()).tobytes() for name, tensor in tensors.items()}
    volatile = [name for name in tensors if name not in ("weights", "half", "images")]
    copy = HostCopy(layout, {torch.device("cuda", 0), torch.device("cpu")})
    given = [tensors[item.name] for item in layout.items]
    copy.prepare()
    for round_ in range(2):
        busy = torch.randn(8192, 8192, device="cuda")
        for _ in range(3):
            busy = busy @ busy
        copy.begin(given, {index for index, item in enumerate(layout.items) if item.name in volatile})
        for name in volatile:
            tensors[name].zero_()
        copy.wait_for_copy()
        for tensor in tensors.values():
            tensor.zero_()
        copy.finish()
        found = {item.name: copy.item_bytes(index).tobytes() for index, item in enumerate(layout.items)}
        assert [name for name in expected if found[name] != expected[name]] == [], f"round {round_}"
        expected = {name: bytes(len(data)) for name, data in expected.items()}
    copy.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_save_of_a_batch_norm_model_does_not_wait_for_the_gpu() -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(256) for _ in range(50))).cuda()
    tensors = {name: LocalShard(tensor) for name, tensor in model.state_dict().items()}
    layout = lay_out(plan_save(tensors, None))
    copy = HostCopy(layout, {torch.device("cuda", 0)})
    given = [tensors[item.name].local for item in layout.items]
    copy.begin(given, range(len(given)))
    copy.finish()
    try:
        torch.cuda.set_sync_debug_mode("error")
        copy.begin(given, range(len(given)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copy.finish()
    copy.close()
