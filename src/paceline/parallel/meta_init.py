"""Initialization of models built on the meta device because they do not fit on one rank.

Modules are initialized one at a time by their `reset_parameters`, in full, and each rank keeps its shard. Random
numbers are seeded by the name of the module, so the weights are the same in every layout.
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
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.parallel.shards import copy_shard_, retie, tied_parameters
from paceline.runtime.rng import derive_seed, preserve_rng_state, seed_cpu


def is_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def apply_materialize(parts: ModelParts, context: PassContext) -> None:
    if is_meta(parts.model):
        device = torch.device("cpu") if context.config.fsdp.offload else context.mesh.device
        materialize(parts.module, parts.model, device, context.config.seed)


def materialize(root: nn.Module, model: nn.Module, device: torch.device, seed: int) -> None:
    """Allocate and initialize everything in `root` (the model, possibly wrapped) that is on the meta device."""
    tied = tied_parameters(model)
    empty = [(name, module, _reset_of(module, model)) for name, module in model.named_modules() if _owns_meta(module)]
    missing = [f"{name} ({type(module).__name__})" for name, module, reset in empty if reset is None]
    if missing:
        raise LayoutError(
            "meta-without-reset", f"Modules on the meta device without reset_parameters(): {', '.join(missing[:4])}."
        )
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    retie(model, tied)
    with preserve_rng_state():
        initialized: set[int] = set()
        for name, module, reset in empty:
            assert reset is not None
            own_seed = derive_seed(seed, crc32(name.encode()))
            _initialize(f"{name} ({type(module).__name__})", module, reset, own_seed, initialized)


def _owns_meta(module: nn.Module) -> bool:
    return any(t is not None and t.is_meta for t in [*module._parameters.values(), *module._buffers.values()])


def _reset_of(module: nn.Module, model: nn.Module) -> Callable[[], Any] | None:
    """The initializer of a Hugging Face model, otherwise `reset_parameters`."""
    return huggingface.initializer(model, module) or getattr(module, "reset_parameters", None)


@torch.no_grad()
def _initialize(name: str, module: nn.Module, reset: Callable[[], Any], seed: int, initialized: set[int]) -> None:
    """Initialize on the CPU, where all ranks draw the same numbers. The first module initializes a tied parameter."""
    parameters: dict[str, nn.Parameter] = {key: p for key, p in module._parameters.items() if p is not None}
    buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
    for key, parameter in parameters.items():
        module._parameters[key] = nn.Parameter(_sentinel(parameter), requires_grad=parameter.requires_grad)
    for key, buffer in buffers.items():
        module._buffers[key] = _sentinel(buffer)
    seed_cpu(seed >> 1)
    reset()
    _require_initialized(name, {key: _get(module._parameters, key) for key in parameters})
    _require_initialized(name, {key: _get(module._buffers, key) for key in buffers})
    for key, parameter in parameters.items():
        if id(parameter) not in initialized:
            copy_shard_(parameter, _get(module._parameters, key))
            initialized.add(id(parameter))
        module._parameters[key] = parameter
    for key, buffer in buffers.items():
        buffer.copy_(_get(module._buffers, key))
        module._buffers[key] = buffer


def _sentinel(like: Tensor) -> Tensor:
    """A full tensor of a value that no initializer uses, to detect uninitialized tensors."""
    if like.is_floating_point():
        return torch.full(like.shape, math.nan, dtype=like.dtype)
    if like.dtype in _INTEGERS:
        return torch.full(like.shape, torch.iinfo(like.dtype).min, dtype=like.dtype)
    return torch.zeros(like.shape, dtype=like.dtype)


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def _require_initialized(name: str, tensors: dict[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if tensor.is_floating_point():
            unset = tensor.isnan()
        elif tensor.dtype in _INTEGERS:
            unset = tensor == torch.iinfo(tensor.dtype).min
        else:
            continue
        if unset.any():
            raise LayoutError(
                "meta-not-filled",
                f"{name} was built on the meta device, and {key!r} is still uninitialized after reset_parameters().",
            )


def _get(tensors: Any, key: str) -> Tensor:
    tensor: Tensor = tensors[key]
    return tensor
