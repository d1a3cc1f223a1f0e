"""Weights for a model that was built without any, on torch's `meta` device: because it does not fit one rank.

Each module is given its first weights by its own `reset_parameters`, one after the other: full for a moment, of which
each rank keeps its shard. Random numbers belong to the module's name, so the weights are the same in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.models import huggingface
from paceline.parallel.shards import copy_shard_, retie, tied_parameters
from paceline.runtime.rng import derive_seed, preserve_rng_state, seed_cpu


def is_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def materialize(root: nn.Module, model: nn.Module, device: torch.device, seed: int) -> None:
    """Memory for what of `root` (the model, or what was put around it) is on meta, and then the values."""
    tied = tied_parameters(model)
    empty = [(name, module, _reset_of(module, model)) for name, module in model.named_modules() if _owns_meta(module)]
    missing = [f"{name} ({type(module).__name__})" for name, module, reset in empty if reset is None]
    if missing:
        raise LayoutError(
            "meta-without-reset",
            f"{', '.join(missing[:4])} lies on the meta device and has no reset_parameters().",
            why="a module without values is filled by its own reset_parameters, which sets parameters and buffers",
            fix="add reset_parameters() to it, or build the model on the CPU",
        )
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    retie(model, tied)
    with preserve_rng_state():
        filled: set[int] = set()
        for name, module, reset in empty:
            assert reset is not None
            _fill(f"{name} ({type(module).__name__})", module, reset, derive_seed(seed, crc32(name.encode())), filled)


def _owns_meta(module: nn.Module) -> bool:
    return any(t is not None and t.is_meta for t in [*module._parameters.values(), *module._buffers.values()])


def _reset_of(module: nn.Module, model: nn.Module) -> Callable[[], Any] | None:
    """The model's own initialisation, else torch's convention."""
    return huggingface.initializer(model, module) or getattr(module, "reset_parameters", None)


@torch.no_grad()
def _fill(name: str, module: nn.Module, reset: Callable[[], Any], seed: int, filled: set[int]) -> None:
    """On the CPU, where every rank draws the same numbers. A parameter that two modules share is the first one's."""
    kept: dict[str, nn.Parameter] = {key: p for key, p in module._parameters.items() if p is not None}
    buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
    for key, parameter in kept.items():
        module._parameters[key] = nn.Parameter(_blank(parameter), requires_grad=parameter.requires_grad)
    for key, buffer in buffers.items():
        module._buffers[key] = _blank(buffer)
    seed_cpu(seed >> 1)
    reset()
    _require_values(name, {key: _of(module._parameters, key) for key in kept})
    _require_values(name, {key: _of(module._buffers, key) for key in buffers})
    for key, parameter in kept.items():
        if id(parameter) not in filled:
            copy_shard_(parameter, _of(module._parameters, key))
            filled.add(id(parameter))
        module._parameters[key] = parameter
    for key, buffer in buffers.items():
        buffer.copy_(_of(module._buffers, key))
        module._buffers[key] = buffer


def _blank(like: Tensor) -> Tensor:
    """A full tensor of values that no reset would leave, so that one which was forgotten can be told."""
    if like.is_floating_point():
        return torch.full(like.shape, math.nan, dtype=like.dtype)
    if like.dtype in _INTEGERS:
        return torch.full(like.shape, torch.iinfo(like.dtype).min, dtype=like.dtype)
    return torch.zeros(like.shape, dtype=like.dtype)


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _require_values(name: str, tensors: dict[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point():
            blank = tensor.isnan()
        elif tensor.dtype in _INTEGERS:
            blank = tensor == torch.iinfo(tensor.dtype).min
        else:
            continue
        if blank.any():
            raise LayoutError(
                "meta-not-filled",
                f"{name} was built on the meta device, and resetting it gives {key!r} no values.",
                why="what a module holds there has a shape only; its reset has to set every parameter and buffer",
                fix="set it in the module's reset_parameters(), or build the model on the CPU",
            )


def _of(tensors: Any, key: str) -> Tensor:
    tensor: Tensor = tensors[key]
    return tensor
