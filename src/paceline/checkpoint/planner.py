"""Who writes and who reads what: torch.distributed.checkpoint's planners, asked through a narrow door.

A save's plan: of what several ranks hold, one writes it, and the bytes are spread evenly. It stays the same as long as
names, shapes and cuts do, so it is made once and kept. A load's plan: which rectangles of which chunks make up the
pieces that this rank holds, however they were cut when they were saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_load_plan,
)
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
    """A tensor's part on this rank, and a tensor that is cut in the same way: None where it is whole."""

    local: Tensor
    cut: DTensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.local.shape if self.cut is None else self.cut.shape

    def as_tensor(self) -> Tensor:
        if self.cut is None:
            return self.local
        return DTensor.from_local(
            self.local, self.cut.device_mesh, self.cut.placements, shape=self.cut.shape, stride=self.cut.stride()
        )

    def signature(self) -> tuple[Any, ...]:
        cut = None if self.cut is None else (id(self.cut.device_mesh), self.cut.placements, self.cut.shape)
        return (self.local.shape, self.local.dtype, cut)


@dataclass(frozen=True)
class WriteItem:
    """A rectangle that this rank writes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def signature(tensors: Mapping[str, LocalShard]) -> tuple[Any, ...]:
    return tuple((name, held.signature()) for name, held in tensors.items())


def plan_save(tensors: Mapping[str, LocalShard], group: Group) -> list[WriteItem]:
    """What this rank writes. With a group all its ranks have to come; without, this rank writes what it has."""
    alone = group is None
    rank = 0 if alone else torch_dist.get_rank(group)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: held.as_tensor() for name, held in tensors.items()}, is_coordinator=rank == 0)
    own = planner.create_local_plan()
    return [_share(item) for item in _globally(planner, own, group).items]


def _globally(planner: DefaultSavePlanner, own: SavePlan, group: Group) -> SavePlan:
    if group is None:
        plans, _ = planner.create_global_plan([own])
        return planner.finish_plan(plans[0])
    size, rank = torch_dist.get_world_size(group), torch_dist.get_rank(group)
    everybody: list[Any] | None = [None] * size if rank == 0 else None
    torch_dist.gather_object(own, everybody, group=group, group_dst=0)
    shares = None if everybody is None else planner.create_global_plan(everybody)[0]
    mine: list[Any] = [None]
    torch_dist.scatter_object_list(mine, shares, group=group, group_src=0)
    return planner.finish_plan(mine[0])


def _share(item: Any) -> WriteItem:
    data = item.tensor_data
    return WriteItem(
        item.index.fqn,
        data.properties.dtype,
        tuple(data.size),
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
    )


@dataclass(frozen=True)
class ReadItem:
    """Copy a rectangle of a chunk into a rectangle of what this rank holds."""

    name: str
    chunk: int  # which of the tensor's
    source: tuple[int, ...]  # offsets within the chunk
    target: tuple[int, ...]  # offsets within this rank's part
    lengths: tuple[int, ...]


def plan_load(wanted: Mapping[str, Tensor], manifest: Manifest) -> list[ReadItem]:
    """`wanted` are tensors of the shapes that the manifest has, cut as they are wanted."""
    known = {name: entry for name in wanted if (entry := manifest.entry(name)) is not None}
    metadata = Metadata({name: _metadata(entry) for name, entry in known.items()})
    plan = create_default_local_load_plan(dict(wanted), metadata)
    reads = []
    for item in plan.items:
        number = item.storage_index.index
        assert number is not None
        rectangle = (tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths))
        reads.append(ReadItem(item.dest_index.fqn, number, *rectangle))
    return reads


def _metadata(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


def narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
