"""This rank's coords on the axes of a layout.

    mesh = Mesh.build(degrees, world)
    mesh.axis("shard")        torch's device mesh along one axis; None where its degree is 1
    mesh.data_rank            which part of a batch this rank reads

Ranks are numbered with `pipeline` outermost and `tensor` innermost: neighbours, which are on one node, talk most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.plan.layout import AXES, Degrees
from paceline.runtime import collectives
from paceline.runtime.process_group import World, init_single


@dataclass(frozen=True)
class Mesh:
    degrees: Degrees
    device: torch.device
    device_mesh: DeviceMesh | None  # None where no axis needs groups of its own
    coords: dict[str, int]  # this rank's coordinate on each axis
    data_group: collectives.Group  # ranks that hold the same part of the model and read different data; None: all

    @classmethod
    def build(cls, degrees: Degrees, world: World, *, wanted: bool = False) -> Mesh:
        """A matter of all ranks. A replicated model needs no groups but the world's; `wanted` makes them anyway."""
        coords = _coordinates(world.rank_info.rank, degrees)
        if degrees.is_replicated and not wanted:
            return cls(degrees, world.device, None, coords, None)
        if world.size == 1:
            init_single(world.device)
        shape = tuple(degrees.of(axis) for axis in AXES)
        device_mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=AXES)
        group = None
        if degrees.data_ranks < degrees.world:
            group = device_mesh["replicate", "shard"]._flatten("data").get_group()
        return cls(degrees, world.device, device_mesh, coords, group)

    def axis(self, name: str) -> DeviceMesh | None:
        return None if self.device_mesh is None or self.degrees.of(name) == 1 else self.device_mesh[name]

    def axes(self, *names: str) -> DeviceMesh:
        """Several axes, those of degree 1 too."""
        assert self.device_mesh is not None
        return self.device_mesh[names]

    def group(self, name: str) -> Any:
        axis = self.axis(name)
        return None if axis is None else axis.get_group()

    @property
    def data_ranks(self) -> int:
        return self.degrees.data_ranks

    @property
    def data_rank(self) -> int:
        return self.coords["replicate"] * self.degrees.shard + self.coords["shard"]

    @property
    def is_last_stage(self) -> bool:
        return self.coords["pipeline"] == self.degrees.pipeline - 1

    @property
    def reports_loss(self) -> bool:
        """Whether this rank says what its data rank computed: of those with the same data, the first on the tensor
        axis and the last of the pipeline, where the loss is. What the others have is the same, or nothing."""
        return self.coords["tensor"] == 0 and self.is_last_stage


def _coordinates(rank: int, degrees: Degrees) -> dict[str, int]:
    coords = {}
    for axis in reversed(AXES):
        rank, coords[axis] = divmod(rank, degrees.of(axis))
    return coords


def broadcast_from_first(tensor: torch.Tensor, group: collectives.Group) -> None:
    """The tensor of the group's first rank, on all of its ranks."""
    if group is None:
        collectives.broadcast(tensor)
    else:
        torch_dist.broadcast(tensor, group=group, group_src=0)
