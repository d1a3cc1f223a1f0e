from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import host_copy
from paceline.checkpoint.host_copy import HostCopy, HostMemory
from paceline.checkpoint.local_store import locate
from paceline.checkpoint.planner import LocalShard, plan_save
from paceline.checkpoint.shard_file import bytes_of, lay_out
from paceline.checkpoint.writer import Description, Writer

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


def test_every_byte_can_be_used_and_is_backed_by_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "PIECE", 1000)
    memory = HostMemory(10_001, None)
    memory.prepare()
    assert memory.bytes.shape == (10_001,) and not memory.bytes.any()
    memory.bytes.fill_(7)
    view = memory.bytes[9_000:]
    memory.unlock()
    del memory
    assert torch.equal(view, torch.full((1_001,), 7, dtype=torch.uint8))


def test_the_memory_may_be_somebody_elses(tmp_path: Path) -> None:
    """As that of a launcher, in which a save outlives its rank. It may be larger than what was asked for."""
    given: list[bytearray] = []

    def allocate(size: int) -> bytearray:
        given.append(bytearray(size + 100))
        return given[-1]

    writer, tensor = Writer(allocate=allocate), torch.arange(1000.0)
    tensors = {"model/w": LocalShard(tensor)}
    writer.begin(locate(tmp_path / "a"), tensors, Description(1, 0, True), background=True).result()
    writer.close()
    [memory] = given
    assert bytes(tensor.numpy().data) in bytes(memory)
    assert (tmp_path / "a" / "rank-0.safetensors").read_bytes().endswith(bytes(tensor.numpy().data))


def test_preparing_can_be_ended_early() -> None:
    memory = HostMemory(1 << 34, None)  # more than this machine may have: nothing is allocated until it is touched
    memory.stop()
    thread = threading.Thread(target=memory.prepare)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_forked_process_that_drops_the_memory_keeps_its_own() -> None:
    """With MADV_DONTFORK, mappings of the child are placed where the memory was, and removed with it."""
    size = 1 << 24
    kept = [host_copy.map_memory(size) for _ in range(4)]
    child = os.fork()
    if not child:
        own = [mmap.mmap(-1, size) for _ in range(8)]
        kept.clear()
        for each in own:
            each[0] = 1  # a segmentation fault if it is gone
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
