"""This rank's coords on the axes of a layout.

    mesh = Mesh.build(degrees, world)
    mesh.axis("shard")        torch's device mesh along one axis; None where its degree is 1
    mesh.data_rank            which part of a batch this rank reads

Ranks are numbered with `pipeline` outermost and `tensor` innermost: neighbours, which are on one node, talk most.
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
from paceline.runtime.process_group import World, init_single


@dataclass(frozen=True)
class Mesh:  # what a step asks for is cached
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
        shape = tuple(degrees.of(name) for name in AXIS_NAMES)
        device_mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=AXIS_NAMES)
        group = None
        reducing = [axis for axis in AXES if axis.reduces_gradients]
        if degrees.along(reducing) < degrees.world:
            group = device_mesh[tuple(axis.name for axis in reducing)]._flatten("data").get_group()
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

    @cached_property
    def data_ranks(self) -> int:
        return self.degrees.data_ranks

    @cached_property
    def data_rank(self) -> int:
        return _number([(self.coords[axis.name], self.degrees.of(axis.name)) for axis in AXES if not axis.same_samples])

    @cached_property
    def reports_loss(self) -> bool:
        """Whether this rank says what its data rank computed. What others with the same samples have is the same, or
        nothing."""
        return all(self._reports(axis) for axis in AXES)

    def _reports(self, axis: Axis) -> bool:
        where = self.coords[axis.name]
        return {"every": True, "first": where == 0, "last": where == self.degrees.of(axis.name) - 1}[axis.loss_on]

    @property
    def repeats_loss(self) -> bool:
        """Whether several ranks compute the loss of the same samples."""
        return any(axis.same_samples and axis.loss_on == "first" and self.degrees.of(axis.name) > 1 for axis in AXES)

    @property
    def coords_in_stage(self) -> dict[str, int]:
        """Coordinates among the ranks that hold, or hold shards of, the same parameters."""
        return {axis.name: self.coords[axis.name] for axis in AXES if axis.holds_apart != "layers"}

    def noise_rank(self, *, tokens_apart: bool) -> int:
        """The number of this rank's random sequence. Ranks with the same values between layers draw the same, so that
        dropout falls on the same of them; `tokens_apart`: they hold different tokens there, and draw on their own."""
        rank, stride = self.data_rank, self.data_ranks
        for axis in AXES:
            if axis.same_samples and (axis.holds_apart == "tokens" or (axis.holds_apart == "weights" and tokens_apart)):
                rank += stride * self.coords[axis.name]
                stride *= self.degrees.of(axis.name)
        stages = [(self.coords[axis.name], self.degrees.of(axis.name)) for axis in AXES if axis.holds_apart == "layers"]
        return rank + self.degrees.world * _number(stages)  # a stage's dropout is not that of another


def _coordinates(rank: int, degrees: Degrees) -> dict[str, int]:
    coords = {}
    for name in reversed(AXIS_NAMES):
        rank, coords[name] = divmod(rank, degrees.of(name))
    return coords


def _number(coordinates: Iterable[tuple[int, int]]) -> int:
    """Coordinates, each with its axis' degree, as one number: the last axis counts fastest."""
    number = 0
    for where, degree in coordinates:
        number = number * degree + where
    return number


def broadcast_from_first(tensor: torch.Tensor, group: collectives.Group) -> None:
    """The tensor of the group's first rank, on all of its ranks."""
    if group is None:
        collectives.broadcast(tensor)
    else:
        torch_dist.broadcast(tensor, group=group, group_src=0)
