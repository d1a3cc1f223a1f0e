from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.checkpoint.host_copy import HostCopy
from paceline.checkpoint.planner import LocalShard, plan_save
from paceline.checkpoint.shard_file import bytes_of, lay_out

TENSORS = {
    "weights": torch.randn(64, 33, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "buffer": torch.arange(7, dtype=torch.int64),
    "scalar": torch.tensor(2.5),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
}


@pytest.fixture(params=[1, 10_000], ids=["by a thread", "before begin returns"])
def copy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCopy]:
    """With as many compute threads as there are cores, nothing is left to copy in the background."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    layout = lay_out(plan_save({name: LocalShard(tensor) for name, tensor in TENSORS.items()}, None))
    made = HostCopy(layout, {torch.device("cpu")})
    yield made
    made.close()


def contents(copy: HostCopy) -> dict[str, bytes]:
    return {item.name: bytes(copy.item_bytes(index)) for index, item in enumerate(copy.layout.items)}


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes(bytes_of(tensor.contiguous())) for name, tensor in tensors.items()}


def test_tensors_may_change_once_they_are_copied_and_the_buffer_is_reused(copy: HostCopy) -> None:
    for round_ in range(2):
        current = {name: tensor.clone() + round_ for name, tensor in TENSORS.items()}
        before = expected(current)
        copy.begin([current[item.name] for item in copy.layout.items], volatile=())
        copy.wait_for_copy()
        for tensor in current.values():
            tensor.zero_()
        copy.finish()
        assert contents(copy) == before


def test_volatile_tensors_may_change_as_soon_as_begin_returns(copy: HostCopy) -> None:
    current = {name: tensor.clone() for name, tensor in TENSORS.items()}
    volatile = {index for index, item in enumerate(copy.layout.items) if item.name in ("buffer", "scalar")}
    copy.begin([current[item.name] for item in copy.layout.items], volatile)
    current["buffer"].zero_()
    current["scalar"].zero_()
    copy.finish()
    assert contents(copy) == expected(TENSORS)
