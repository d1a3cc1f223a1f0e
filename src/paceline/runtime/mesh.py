"""The device mesh of a layout.

    mesh = Mesh.build(degrees, world)
    mesh.axis("shard")        # torch's DeviceMesh of one axis; None if its degree is 1
    mesh.data_rank            # which part of a batch this rank reads

`pipeline` is the outermost axis and `tensor` the innermost: adjacent ranks, on one node, communicate most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.plan.layout import AXES, AXIS_NAMES, Axis, Degrees
from paceline.runtime import collectives
from paceline.runtime.process_group import World, init_single, prepare_groups


@dataclass(frozen=True)
class Mesh:  # properties that are used in every step are cached
    degrees: Degrees
    device: torch.device
    device_mesh: DeviceMesh | None  # None if no axis needs process groups
    coords: dict[str, int]  # of this rank, by axis
    data_group: collectives.Group  # ranks with the same part of the model and different data; None: all ranks
    local_replicas: int = 1  # that exchange nothing in a step: then groups are within a replica
    step_group: collectives.Group = None  # the ranks that communicate in a step, if several; None: all ranks

    @classmethod
    def build(cls, degrees: Degrees, world: World, *, always: bool = False, local_replicas: int = 1) -> Mesh:
        """Collective: must be called on every rank. A replicated model has no device mesh unless `always` is set."""
        coords = _coordinates(world.rank_info.rank, degrees)
        if degrees.is_replicated and not always:
            return cls(degrees, world.device, None, coords, None, local_replicas)
        if world.size == 1:
            init_single(world.device)
        shape, group, step_group = tuple(map(degrees.of, AXIS_NAMES)), None, None
        device_mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=AXIS_NAMES)
        reducing = [axis for axis in AXES if axis.reduces_gradients]
        if local_replicas > 1:
            group, replica = device_mesh["shard"].get_group(), device_mesh["pipeline", "shard", "tensor"]
            step_group = replica._flatten("replica").get_group()
        elif degrees.along(reducing) < degrees.world:
            group = device_mesh[tuple(axis.name for axis in reducing)]._flatten("data").get_group()
        prepare_groups()
        return cls(degrees, world.device, device_mesh, coords, group, local_replicas, step_group)

    def axis(self, name: str) -> DeviceMesh | None:
        return None if self.device_mesh is None or self.degrees.of(name) == 1 else self.device_mesh[name]

    def axes(self, *names: str) -> DeviceMesh:
        """A DeviceMesh of several axes, including those of degree 1."""
        assert self.device_mesh is not None
        return self.device_mesh[names]

    def group(self, name: str) -> Any:
        axis = self.axis(name)
        return None if axis is None else axis.get_group()

    @cached_property
    def data_ranks(self) -> int:
        return self.degrees.data_ranks

    @cached_property
    def data_rank(self) -> int:
        return _number([(self.coords[axis.name], self.degrees.of(axis.name)) for axis in AXES if not axis.same_samples])

    @cached_property
    def reports_loss(self) -> bool:
        """Whether this rank reports the loss of its data rank: other ranks have the same loss, or none."""
        return all(self._reports(axis) for axis in AXES)

    def _reports(self, axis: Axis) -> bool:
        coord = self.coords[axis.name]
        return {"every": True, "first": coord == 0, "last": coord == self.degrees.of(axis.name) - 1}[axis.loss_on]

    @property
    def repeats_loss(self) -> bool:
        """Whether several ranks compute the loss of the same samples."""
        return any(axis.same_samples and axis.loss_on == "first" and self.degrees.of(axis.name) > 1 for axis in AXES)

    @property
    def coords_in_stage(self) -> dict[str, int]:
        """Coordinates among the ranks with replicas or shards of the same parameters."""
        return {axis.name: self.coords[axis.name] for axis in AXES if axis.partitions != "layers"}

    def noise_rank(self, *, tokens_apart: bool) -> int:
        """The number of this rank's random sequence. Ranks with the same activations draw the same dropout masks; with
        `tokens_apart` (sequence parallelism) their activations are of different tokens, so they draw different ones."""
        rank, stride = self.data_rank, self.data_ranks
        for axis in AXES:
            if axis.same_samples and (axis.partitions == "tokens" or (axis.partitions == "weights" and tokens_apart)):
                rank += stride * self.coords[axis.name]
                stride *= self.degrees.of(axis.name)
        stages = [(self.coords[axis.name], self.degrees.of(axis.name)) for axis in AXES if axis.partitions == "layers"]
        return rank + self.degrees.world * _number(stages)  # different in each stage


def _coordinates(rank: int, degrees: Degrees) -> dict[str, int]:
    coords = {}
    for name in reversed(AXIS_NAMES):
        rank, coords[name] = divmod(rank, degrees.of(name))
    return coords


def _number(coordinates: Iterable[tuple[int, int]]) -> int:
    """The row-major index for (coordinate, degree) pairs: the last axis varies fastest."""
    number = 0
    for coord, degree in coordinates:
        number = number * degree + coord
    return number


def broadcast_from_first(tensor: torch.Tensor, group: collectives.Group) -> None:
    """Broadcast from the first rank of a group."""
    if group is None:
        collectives.broadcast(tensor)
    else:
        torch_dist.broadcast(tensor, group=group, group_src=0)
