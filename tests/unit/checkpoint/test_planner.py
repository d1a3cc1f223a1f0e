from __future__ import annotations

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from paceline import dist
from paceline.checkpoint.manifest import BLOCK, FORMAT, Chunk, Entry, Manifest
from paceline.checkpoint.planner import LocalShard, WriteItem, narrow, plan_load, plan_save, signature
from worlds import ranks


def manifest_of(entry: Entry) -> Manifest:
    return Manifest(
        format=FORMAT, step=1, epoch=0, optimizer=False, created="", parent=None, versions={}, layout={}, recipe={},
        data={}, state={}, metadata={}, block=BLOCK, files={}, tensors={"w": entry}, aliases={},
    )  # fmt: skip


def test_one_rank_writes_every_tensor_in_full() -> None:
    tensors = {"a": LocalShard(torch.zeros(2, 3)), "b": LocalShard(torch.tensor(1, dtype=torch.int64))}
    assert sorted(plan_save(tensors, None), key=lambda item: item.name) == [
        WriteItem("a", torch.float32, (2, 3), (0, 0), (2, 3)),
        WriteItem("b", torch.int64, (), (), ()),
    ]


@ranks(2)
def test_a_replicated_tensor_is_written_once_and_a_sharded_one_by_every_rank() -> None:
    group = torch.distributed.group.WORLD
    full = torch.arange(15.0).reshape(5, 3)
    sharded = distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)])
    tensors = {"same": LocalShard(torch.ones(4)), "sharded": LocalShard(sharded.to_local(), sharded)}
    own = [(item.name, list(item.offsets), list(item.sizes)) for item in plan_save(tensors, group)]
    first, second = dist.all_gather_object(own)
    assert ["sharded", [0, 0], [3, 3]] in first and ["sharded", [3, 0], [2, 3]] in second
    assert [item[0] for item in first + second].count("same") == 1


def test_a_tensor_is_read_from_all_chunks_that_it_was_saved_in() -> None:
    full = torch.arange(12.0).reshape(4, 3)
    chunks = [
        Chunk(file="rank-0.safetensors", at=0, offsets=[0, 0], sizes=[3, 3], hashes=[]),
        Chunk(file="rank-1.safetensors", at=0, offsets=[3, 0], sizes=[1, 3], hashes=[]),
    ]
    saved = [narrow(full, chunk.offsets, chunk.sizes) for chunk in chunks]
    loaded = torch.full((4, 3), -1.0)
    for item in plan_load({"w": loaded}, manifest_of(Entry(dtype="F32", shape=[4, 3], chunks=chunks))):
        narrow(loaded, item.target, item.lengths).copy_(narrow(saved[item.chunk], item.source, item.lengths))
    assert torch.equal(loaded, full)


def test_a_plan_stays_valid_until_a_name_shape_or_dtype_changes() -> None:
    planned = signature({"a": LocalShard(torch.zeros(2))})
    assert signature({"a": LocalShard(torch.ones(2))}) == planned
    assert signature({"b": LocalShard(torch.zeros(2))}) != planned
    assert signature({"a": LocalShard(torch.zeros(3))}) != planned
    assert signature({"a": LocalShard(torch.zeros(2).bfloat16())}) != planned
