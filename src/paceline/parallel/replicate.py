"""Data parallel: every rank holds the whole model; gradients are averaged while the backward runs (torch's DDP)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config.sections import Ddp
from paceline.runtime import collectives


def replicate(
    step: nn.Module, ranks: int, device: torch.device, settings: Ddp, *, allow_unused: bool = False
) -> nn.Module:
    """The step, with its gradients averaged over `ranks`; one rank needs no wrapping."""
    if ranks == 1:
        return step
    options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
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


def share_buffers(model: nn.Module) -> None:
    """Rank 0's buffers (a BatchNorm's running statistics) on every rank: DDP does that before a forward, not after the
    last one, and an evaluation has to be of one model."""
    for buffer in model.buffers():
        collectives.broadcast(buffer)


def unwrap(model: nn.Module) -> tuple[nn.Module, str | None]:
    """The user's own module out of DataParallel or DDP, and the name of what was taken off."""
    if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
        return model.module, type(model).__name__
    return model, None
