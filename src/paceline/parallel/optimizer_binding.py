"""An optimizer that was built on the plain model, bound to what a layout made of it.

Groups and settings stay; each parameter is replaced by the one that has its name now. Optimizers that work element by
element get this rank's shards as plain tensors; others get the DTensors themselves, where torch can compute on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from paceline.config.components import OptimizerFacts, optimizer_facts
from paceline.errors import LayoutError
from paceline.parallel.shards import as_dtensor_like, local_shard, shard_of


def names_of(model: nn.Module) -> dict[int, str]:
    """Which name each parameter object has, before a layout replaces them."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def bind(
    optimizer: optim.Optimizer, names: Mapping[int, str], model: nn.Module, facts: OptimizerFacts | None = None
) -> dict[Tensor, Tensor]:
    """Replace the parameters in `optimizer`; returns what it now holds in place of each sharded parameter of the model.

    Parameters that this rank no longer holds (they are another stage's) leave the optimizer. `facts` are those of the
    recipe's optimizer; without them, the class of the optimizer tells.
    """
    if facts is None:
        facts = optimizer_facts([(each.__module__, each.__name__) for each in type(optimizer).__mro__])
    now = dict(model.named_parameters())
    sharded = any(_is_sharded(parameter) for parameter in now.values())
    if sharded and (facts.needs_full or getattr(optimizer, "needs_whole_weights", False)):
        raise LayoutError(
            "optimizer-needs-whole-weights",
            f"{type(optimizer).__name__} can't work on weights that are cut over ranks.",
            why="it computes with whole matrices (their rows, columns or directions), of which each rank holds a part",
            fix="use adamw, adam, sgd or adagrad; or strategy: ddp",
        )
    as_local_shards = not sharded or facts.elementwise
    held: dict[Tensor, Tensor] = {}
    state = dict(optimizer.state)
    optimizer.state.clear()  # in place, as its parts may share it
    for group in optimizer.param_groups:
        kept: list[Tensor] = []
        for old in group["params"]:
            new = now.get(names[id(old)])
            if new is None:
                continue
            mine = local_shard(new) if as_local_shards and isinstance(new, DTensor) else new
            kept.append(mine)
            if mine is not new:
                held[new] = mine
            if old in state:
                optimizer.state[mine] = _moved(state[old], old, new, names[id(old)], as_local_shards)
        group["params"] = kept
    return held


def _is_sharded(parameter: Tensor) -> bool:
    """Not where it is a DTensor along axes of one rank, or a copy."""
    if not isinstance(parameter, DTensor):
        return False
    sizes = parameter.device_mesh.shape
    return any(n > 1 and not place.is_replicate() for n, place in zip(sizes, parameter.placements, strict=True))


def _moved(state: Mapping[str, Any], old: Tensor, new: Tensor, name: str, as_local_shards: bool) -> dict[str, Any]:
    """What the optimizer remembers of a parameter, sharded as the parameter is."""
    moved: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.dim() or not isinstance(new, DTensor):
            moved[key] = value
        elif value.shape == old.shape:
            mine = shard_of(value, new).to(local_shard(new).device, copy=True)
            moved[key] = mine if as_local_shards else as_dtensor_like(new, mine)
        else:
            raise LayoutError(
                "optimizer-state-not-cut",
                f"The optimizer has taken steps, and its {key!r} of {name} (shape {tuple(value.shape)}) can't be cut "
                f"as the weight (shape {tuple(old.shape)}) is.",
                fix="give an optimizer that has not stepped yet, or load its state with load_checkpoint",
            )
    return moved


def refuse_mixed(error: RuntimeError, optimizer: optim.Optimizer) -> None:
    """Say it in our words where an optimizer of the user's mixes plain tensors with DTensors."""
    if "mixed torch.Tensor and DTensor" in str(error):
        raise LayoutError(
            "optimizer-mixes-tensors",
            f"{type(optimizer).__name__} computes with plain tensors beside weights that are cut over ranks.",
            why="an optimizer that is not torch's gets the cut weights (DTensors), as it may need norms of whole ones",
            fix="make its state with torch.zeros_like(parameter) rather than torch.zeros(shape); or use strategy: ddp",
        ) from error


@torch.no_grad()
def assign_shard_gradients(held: Mapping[Tensor, Tensor]) -> bool:
    """This rank's shard of each gradient, to the plain tensor that the optimizer holds; whether there were all."""
    complete = True
    for parameter, mine in held.items():
        gradient = parameter.grad
        mine.grad = None if gradient is None else local_shard(gradient)
        complete &= gradient is not None or not parameter.requires_grad
    return complete
