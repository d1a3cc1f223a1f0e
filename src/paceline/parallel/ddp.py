"""Data parallel: every rank holds the whole model; gradients are averaged while the backward runs (torch's DDP)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config.sections import DdpSection
from paceline.errors import LayoutError
from paceline.runtime.mesh import Mesh, broadcast_from_first


def replicate(
    step: nn.Module, ranks: int, device: torch.device, settings: DdpSection, *, allow_unused: bool = False
) -> nn.Module:
    """The step, with its gradients averaged over `ranks`; one rank needs no wrapping."""
    if ranks == 1:
        return step
    kinds = sorted({parameter.device.type for parameter in step.parameters()})
    if len(kinds) > 1:
        raise LayoutError(
            "copies-on-mixed-devices",
            f"The model's layers lie on {' and '.join(kinds)}, and there are {ranks} ranks.",
            why="torch's DDP averages gradients of one kind of device",
            fix="place all layers on GPUs, or train it in one process",
        )
    # A model whose layers the user put on several GPUs has no one device.
    alone = len({parameter.device for parameter in step.parameters()}) == 1
    options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" and alone else {}
    if settings.bucket_mb is not None:
        # Said aloud, torch makes the first bucket as large as the others, and the reduction begins later.
        options["bucket_cap_mb"] = settings.bucket_mb
    if not settings.broadcast_buffers:
        # torch 2.13 renamed it, and warns about the old name.
        new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        options["forward_sync_buffers" if new else "broadcast_buffers"] = False
    return DistributedDataParallel(
        step,
        static_graph=settings.static_graph,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        find_unused_parameters=allow_unused and not settings.static_graph,
        **options,
    )


def broadcast_buffers(model: nn.Module, mesh: Mesh) -> None:
    """The first rank's buffers (a BatchNorm's running statistics) on every rank that reads other data: DDP does that
    before a forward, not after the last one, and an evaluation has to be of one model."""
    if mesh.data_ranks > 1:
        for buffer in model.buffers():
            broadcast_from_first(buffer, mesh.data_group)


def unwrap(model: nn.Module) -> tuple[nn.Module, str | None]:
    """The user's own module out of DataParallel or DDP, and the name of what was taken off."""
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        return model.module, type(model).__name__
    return model, None
