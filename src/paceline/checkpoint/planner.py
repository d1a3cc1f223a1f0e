"""Plans of what each rank writes and reads, made by torch.distributed.checkpoint.

Save: each replicated tensor is written by one rank, and bytes are balanced across ranks. A plan is reused while names,
shapes and placements stay the same. Load: the rectangles of saved chunks that make up the shards of this rank,
whatever layout they were saved with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from paceline.checkpoint.manifest import DTYPES, Entry, Manifest

Group = torch_dist.ProcessGroup | None


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a tensor, and a DTensor with the same placements if it is sharded."""

    local: Tensor
    like: DTensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.local.shape if self.like is None else self.like.shape

    def as_tensor(self) -> Tensor:
        if self.like is None:
            return self.local
        return DTensor.from_local(
            self.local, self.like.device_mesh, self.like.placements, shape=self.like.shape, stride=self.like.stride()
        )

    def signature(self) -> tuple[Any, ...]:
        like = None if self.like is None else (id(self.like.device_mesh), self.like.placements, self.like.shape)
        return (self.local.shape, self.local.dtype, like)


@dataclass(frozen=True)
class WriteItem:
    """A rectangle of a tensor that this rank writes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the full tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def signature(tensors: Mapping[str, LocalShard]) -> tuple[Any, ...]:
    return tuple((name, shard.signature()) for name, shard in tensors.items())


def plan_save(tensors: Mapping[str, LocalShard], group: Group) -> list[WriteItem]:
    """The items that this rank writes. Collective over `group`; without a group, this rank writes everything."""
    rank = 0 if group is None else torch_dist.get_rank(group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: shard.as_tensor() for name, shard in tensors.items()}, is_coordinator=rank == 0)
    own = planner.create_local_plan()
    return [_write_item(item) for item in _global_plan(planner, own, group).items]


def _global_plan(planner: DefaultSavePlanner, own: SavePlan, group: Group) -> SavePlan:
    if group is None:
        plans, _ = planner.create_global_plan([own])
        return planner.finish_plan(plans[0])
    size, rank = torch_dist.get_world_size(group), torch_dist.get_rank(group)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    torch_dist.gather_object(own, gathered, group=group, group_dst=0)
    global_plans = None if gathered is None else planner.create_global_plan(gathered)[0]
    mine: list[Any] = [None]
    torch_dist.scatter_object_list(mine, global_plans, group=group, group_src=0)
    return planner.finish_plan(mine[0])


def _write_item(item: Any) -> WriteItem:
    data = item.tensor_data
    return WriteItem(
        item.index.fqn, data.properties.dtype, tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    )


@dataclass(frozen=True)
class ReadItem:
    """A rectangle of a chunk, and its place in this rank's shard."""

    name: str
    chunk: int  # index into the tensor's chunks
    source: tuple[int, ...]  # offsets within the chunk
    target: tuple[int, ...]  # offsets within the shard
    lengths: tuple[int, ...]


def plan_load(targets: Mapping[str, Tensor], manifest: Manifest) -> list[ReadItem]:
    """The items to read. `targets` have the shapes in the manifest, and the sharding of this rank."""
    known = {name: entry for name in targets if (entry := manifest.entry(name)) is not None}
    metadata = Metadata({name: _metadata(entry) for name, entry in known.items()})
    plan = create_default_local_load_plan(dict(targets), metadata)
    items = []
    for item in plan.items:
        index = item.storage_index.index
        assert index is not None
        rectangle = (tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths))
        items.append(ReadItem(item.dest_index.fqn, index, *rectangle))
    return items


def _metadata(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


def narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
