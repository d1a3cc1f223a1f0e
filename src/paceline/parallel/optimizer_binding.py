"""Rebinds an optimizer, built from the plain model, to the parameters of the composed model.

Parameter groups and settings are kept; parameters are replaced by name. Elementwise optimizers receive the local shards
as plain tensors, others receive DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from paceline.config.components import OptimizerFacts, optimizer_facts
from paceline.errors import LayoutError
from paceline.parallel.shards import as_dtensor_like, local_shard, shard_of


def names_of(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """Names of parameters by id, recorded before a layout replaces the parameters."""
    return {id(parameter): name for name, parameter in named}


def bind(
    optimizer: optim.Optimizer, names: Mapping[int, str], model: nn.Module, facts: OptimizerFacts | None = None
) -> dict[Tensor, Tensor]:
    """Replace the parameters of `optimizer`. Returns the tensor it now holds for each sharded parameter.

    Parameters of other pipeline stages are removed. Without `facts`, they are looked up by the class of the optimizer.
    """
    if facts is None:
        facts = optimizer_facts([(each.__module__, each.__name__) for each in type(optimizer).__mro__])
    now = dict(model.named_parameters())
    sharded = any(_is_sharded(parameter) for parameter in now.values())
    if sharded and (facts.needs_full or getattr(optimizer, "needs_whole_weights", False)):
        raise LayoutError(
            "optimizer-needs-whole-weights", f"{type(optimizer).__name__} does not support sharded parameters."
        )
    as_local_shards = not sharded or facts.elementwise
    held: dict[Tensor, Tensor] = {}
    state = dict(optimizer.state)
    optimizer.state.clear()  # in place: the optimizers inside a combined one may share it
    for group in optimizer.param_groups:
        kept: list[Tensor] = []
        for old in group["params"]:
            new = now.get(names[id(old)])
            if new is None:
                continue
            local = local_shard(new) if as_local_shards and isinstance(new, DTensor) else new
            kept.append(local)
            if local is not new:
                held[new] = local
            if old in state:
                optimizer.state[local] = _reshard(state[old], old, new, names[id(old)], as_local_shards)
        group["params"] = kept
    return held


def _is_sharded(parameter: Tensor) -> bool:
    """Whether each rank holds only a part. False for DTensors that are replicated or on a single rank."""
    if not isinstance(parameter, DTensor):
        return False
    sizes = parameter.device_mesh.shape
    return any(n > 1 and not place.is_replicate() for n, place in zip(sizes, parameter.placements, strict=True))


def _reshard(state: Mapping[str, Any], old: Tensor, new: Tensor, name: str, as_local_shards: bool) -> dict[str, Any]:
    """The optimizer state of a parameter, sharded like the parameter."""
    resharded: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.dim() or not isinstance(new, DTensor):
            resharded[key] = value
        elif value.shape == old.shape:
            local = shard_of(value, new).to(local_shard(new).device, copy=True)
            resharded[key] = local if as_local_shards else as_dtensor_like(new, local)
        else:
            raise LayoutError(
                "optimizer-state-not-cut",
                f"The optimizer has already taken steps, and its {key!r} of {name} (shape {tuple(value.shape)}) can't "
                f"be sharded like the parameter (shape {tuple(old.shape)}).",
            )
    return resharded


def raise_on_mixed_tensors(error: Exception, optimizer: optim.Optimizer) -> None:
    """Replace torch's error when a custom optimizer mixes plain tensors and DTensors."""
    if "mixed torch.Tensor and DTensor" in str(error):
        raise LayoutError(
            "optimizer-mixes-tensors",
            f"{type(optimizer).__name__} mixes plain tensors with sharded parameters (DTensors).",
        ) from error


@torch.no_grad()
def assign_shard_gradients(held: Mapping[Tensor, Tensor]) -> bool:
    """Assign local gradient shards to the tensors of the optimizer. Returns whether no gradient was missing."""
    complete = True
    for parameter, local in held.items():
        gradient = parameter.grad
        local.grad = None if gradient is None else local_shard(gradient)
        complete &= gradient is not None or not parameter.requires_grad
    return complete
