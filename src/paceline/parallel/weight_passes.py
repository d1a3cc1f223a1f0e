"""Passes on weights as such: the dtype in which they are trained, their device, their memory format, and their values,
which are those of rank 0."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from paceline.models.weights import as_channels_last, convert_weights
from paceline.parallel.meta_init import is_meta, materialize
from paceline.parallel.model_parts import ForwardContext, ModelParts, PassContext
from paceline.parallel.shards import broadcast_weights
from paceline.parallel.split import ALREADY_PLACED, MultiContext, spans_devices
from paceline.plan.passes import is_sharded
from paceline.precision import policies
from paceline.text import plural


def apply_precision(parts: ModelParts, context: PassContext) -> None:
    precision = context.config.precision
    policies.prepare_model(parts.model, precision)
    cast = policies.input_cast(precision)
    parts.inputs += [] if cast is None else [cast]
    parts.forward_contexts.append(partial(_autocast, parts.model, precision, context.mesh.device))


def _autocast(model: nn.Module, precision: str, device: torch.device) -> ForwardContext | None:
    """For each type of device that holds parameters."""
    if not spans_devices(model):
        return policies.forward_context(precision, device)
    types = dict.fromkeys(parameter.device.type for parameter in model.parameters())
    return MultiContext([policies.forward_context(precision, torch.device(each)) for each in types])


def apply_placement(parts: ModelParts, context: PassContext) -> str | None:
    device = context.mesh.device
    if is_meta(parts.model):
        materialize(parts.model, parts.model, device, context.config.seed)
    if spans_devices(parts.model):
        return ALREADY_PLACED
    parts.model.to(device)
    return None


def apply_broadcast(parts: ModelParts, context: PassContext) -> None:
    broadcast_weights(parts.model, context.mesh.device)


def apply_channels_last(parts: ModelParts, context: PassContext) -> str:
    parts.inputs.append(as_channels_last)
    if is_sharded(context.config, context.mesh.degrees):
        return "channels_last: images only, because FSDP2 gathers contiguous parameters"
    return f"channels_last: images and {plural(convert_weights(parts.model), 'parameter')}"
