"""This rank's pieces of a model that is cut over ranks, as plain tensors; and back to whole ones.

torch's DTensor knows how a tensor is cut, but every operation on one goes through Python. What happens after the
backward is done element by element (scaling, clipping, the optimizer, moving averages), and gives the same on the
pieces alone: faster, and with every fused kernel. Only a norm has to be put together over the ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh


@torch.no_grad()
def local_shard(tensor: Tensor) -> Tensor:
    """What of it lies on this rank; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_primary_shard(parameter: Tensor, mesh: Mesh) -> bool:
    """Whether this rank's piece goes into a sum over all ranks: of copies, only the first one does."""
    place = mesh.coords_in_stage
    if isinstance(parameter, DTensor):
        for axis, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if not placement.is_replicate():
                place.pop(axis)
    return not any(place.values())


def shard_of(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` that this rank holds of `like`. Along the tensor axis, the last, a tensor is cut first."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = like.placements[axis]
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]
            parts = whole.chunk(mesh.size(axis), dim)
            number = mesh.get_local_rank(axis)
            whole = parts[number] if number < len(parts) else whole.narrow(dim, 0, 0)
    return whole


@torch.no_grad()
def copy_shard_(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of `whole` into `tensor`."""
    local_shard(tensor).copy_(shard_of(whole, tensor))


def as_dtensor_like(parameter: Tensor, own: Tensor) -> Tensor:
    """`own`, this rank's piece of something that is cut as the parameter is, as a tensor that knows so."""
    if isinstance(own, DTensor) or not isinstance(parameter, DTensor) or own.shape != local_shard(parameter).shape:
        return own
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def gather_full_tensors(tensors: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """Every tensor whole, on the CPU of rank 0, also those of other stages; nothing elsewhere. All ranks have to come,
    with the same names along every axis but `pipeline`."""
    speaks = not any(mesh.coords_in_stage.values())
    own: dict[str, Tensor] = {}
    with _quiet_gathering():
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if speaks:
                own[name] = full.detach().cpu() if isinstance(tensor, DTensor) else full.detach()
    if mesh.degrees.pipeline == 1:
        return own
    return _over_stages(own, mesh, speaks)


def _over_stages(own: dict[str, Tensor], mesh: Mesh, speaks: bool) -> dict[str, Tensor]:
    """To rank 0, from the rank of each other stage that has its tensors."""
    kinds = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in own.items()] if speaks else []
    stages = collectives.all_gather_object(kinds)
    rank = collectives.rank()
    if rank and speaks:
        for tensor in own.values():
            torch_dist.send(tensor.to(mesh.device).contiguous(), 0)
    if rank:
        return {}
    for source, tensors in enumerate(stages):
        if source:
            for name, dtype, shape in tensors:
                received = torch.empty(shape, dtype=getattr(torch, dtype), device=mesh.device)
                torch_dist.recv(received, source)
                own[name] = received.cpu()
    return own


@contextmanager
def _quiet_gathering() -> Iterator[None]:
    """torch warns that a tensor which is cut twice takes two collectives to gather; here there is no other way."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_cut(parameters: Iterable[Tensor]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one and the same tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, groups: Iterable[list[str]]) -> None:
    """Make the parameters of each group the group's first again, after something has replaced them one by one."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, parameter)


def broadcast_weights(model: nn.Module, device: torch.device) -> None:
    """Rank 0's weights and buffers on every rank, one tensor after the other, as DDP does at its start."""
    if collectives.world() == 1:
        return
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            with torch.no_grad():
                there = tensor.detach().to(device)
                collectives.broadcast(there)
                if there.data_ptr() != tensor.data_ptr():
                    tensor.copy_(there)
