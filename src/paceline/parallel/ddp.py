"""Data parallelism: every rank holds a replica; gradients are averaged during the backward (torch's DDP)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config.sections import DdpSection
from paceline.errors import LayoutError
from paceline.models.usage_errors import require_trainable
from paceline.models.weights import as_moved
from paceline.parallel.comm_hook import CommHook
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh, broadcast_from_first


def replicate(
    step: nn.Module,
    device: torch.device,
    settings: DdpSection,
    *,
    allow_unused: bool = False,
    hook: CommHook | None = None,
    bucket_mb: float | None = None,
    again: bool = False,
) -> DistributedDataParallel:
    """Wrap the step in DDP, which broadcasts the weights of rank 0 unless it is built `again`. `bucket_mb`: instead of
    that in the settings, which may be `auto`."""
    types = sorted({parameter.device.type for parameter in step.parameters()})
    if len(types) > 1:
        raise LayoutError(
            "copies-on-mixed-devices",
            f"The model has layers on {' and '.join(types)}, but there are {collectives.world()} ranks.",
            why="DDP reduces gradients of a single device type only",
            fix="place all layers on GPUs, or train in one process",
        )
    require_trainable(getattr(step, "model", step))
    # device_ids must be omitted for a model on several GPUs.
    one_device = len({parameter.device for parameter in step.parameters()}) == 1
    options: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" and one_device else {}
    if bucket_mb is not None:
        # An explicit size also applies to the first bucket, which torch keeps small to start the reduction early.
        options["bucket_cap_mb"] = bucket_mb
    if not settings.broadcast_buffers:
        # Renamed in torch 2.13; the old name is deprecated.
        new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        options["forward_sync_buffers" if new else "broadcast_buffers"] = False
    _exclude_unmovable(step, broadcast=not again)
    ddp = DistributedDataParallel(
        step,
        static_graph=settings.static_graph,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        find_unused_parameters=allow_unused and not settings.static_graph,
        init_sync=not again,
        **options,
    )
    if hook is not None:
        hook.register(ddp)
    return ddp


def _exclude_unmovable(step: nn.Module, *, broadcast: bool) -> None:
    """Keep tensors whose dtype no backend moves (int16, float8) from DDP, and move their bytes."""
    named = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    odd = {name: tensor.detach() for name, tensor in named.items() if as_moved(tensor) is not tensor}
    if odd:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, list(odd))
    for tensor in odd.values() if broadcast else ():
        collectives.broadcast(as_moved(tensor))


def broadcast_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast buffers (running statistics) over the data ranks. DDP does so before each forward but not after the
    last one, and all ranks must evaluate the same model. With local steps: over those of this replica."""
    if mesh.data_ranks > mesh.local_replicas:
        for buffer in model.buffers():
            broadcast_from_first(as_moved(buffer), mesh.data_group)
