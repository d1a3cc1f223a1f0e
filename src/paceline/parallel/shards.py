"""Local shards of DTensors as plain tensors, and full tensors from shards.

Operations on DTensors are dispatched in Python. Everything after the backward is elementwise (scaling, clipping, the
optimizer, moving averages) and runs on local shards instead, with fused kernels. Only norms are reduced over ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.log import at_level
from paceline.models.weights import as_moved
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.runtime.method_check import require_same_method


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """The shard of this rank, sharing memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_primary_shard(parameter: Tensor, mesh: Mesh) -> bool:
    """Whether this rank contributes its shard to a sum over all ranks of a step: of several replicas, only the first
    does."""
    place = mesh.coords_in_stage
    if mesh.local_replicas > 1:
        del place["replicate"]
    if isinstance(parameter, DTensor):
        own = parameter.device_mesh  # may have other axes than that of the run
        for axis, placement in zip(own.mesh_dim_names or (), parameter.placements, strict=True):
            place[axis] = own.get_local_rank(axis) if placement.is_replicate() else 0
    return not any(place.values())


def shard_of(full: Tensor, like: Tensor) -> Tensor:
    """The local part of `full` if it is sharded like `like`. The tensor axis, the last one, is sharded first."""
    if not isinstance(like, DTensor):
        return full
    mesh = like.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = like.placements[axis]
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            shards = full.chunk(mesh.size(axis), dim)
            number = mesh.get_local_rank(axis)
            full = shards[number] if number < len(shards) else full.narrow(dim, 0, 0)
    return full


@torch.no_grad()
def copy_shard_(tensor: Tensor, full: Tensor) -> None:
    """Copy this rank's shard of `full` into `tensor`."""
    local_shard(tensor).copy_(shard_of(full, tensor))


def as_dtensor_like(parameter: Tensor, own: Tensor) -> Tensor:
    """The local shard `own` as a DTensor that is sharded like `parameter`."""
    if isinstance(own, DTensor) or not isinstance(parameter, DTensor) or own.shape != local_shard(parameter).shape:
        return own
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def gather_full_tensors(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Full tensors of all stages, on the CPU of rank 0; empty on other ranks. Collective: must be called on every rank,
    with the same names along every axis but `pipeline`."""
    require_same_method()
    is_primary = not any(mesh.coords_in_stage.values())
    own: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    # Without the warning that gathering a tensor sharded along two axes takes two collectives: it has to.
    with at_level("torch.distributed.tensor._redistribute", logging.ERROR):
        for name, tensor in tensors.items():
            first = names.setdefault(id(tensor), name)
            full = tensor.full_tensor() if isinstance(tensor, DTensor) and first == name else tensor
            if is_primary and first != name:  # tied parameters stay one tensor
                own[name] = own[first]
            elif is_primary:
                own[name] = full.detach().cpu() if isinstance(tensor, DTensor) else full.detach()
    if mesh.degrees.pipeline == 1:
        return own
    return _gather_stages(own, mesh, is_primary)


def _gather_stages(own: dict[str, Tensor], mesh: Mesh, is_primary: bool) -> dict[str, Tensor]:
    """Send the full tensors of the other stages to rank 0."""
    sent = own if is_primary else {}
    metadata = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in sent.items()]
    stages = collectives.all_gather_object(metadata)
    rank = collectives.rank()
    if rank:
        for tensor in sent.values():
            torch_dist.send(as_moved(tensor.to(mesh.device).contiguous()), 0)
        return {}
    for source, tensors in enumerate(stages):
        if source:
            for name, dtype, shape in tensors:
                received = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
                torch_dist.recv(as_moved(received), source)
                own[name] = received.cpu()
    return own


def has_dtensors(parameters: Iterable[Tensor]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Groups of names that refer to the same parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, groups: Iterable[list[str]]) -> None:
    """Tie the parameters of each group to its first again, after each was replaced separately."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, parameter)


def broadcast_weights(model: nn.Module, device: torch.device) -> None:
    """Broadcast parameters and buffers from rank 0, as DDP does when it is constructed."""
    if collectives.world() == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            with torch.no_grad():
                on_device = tensor.detach().to(device)
                collectives.broadcast(as_moved(on_device))
                if on_device.data_ptr() != tensor.data_ptr():
                    tensor.copy_(on_device)
