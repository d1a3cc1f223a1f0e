"""Refuses parameters that torch can't train, or not in this layout, with a name instead of an error of a kernel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from paceline.config.recipe import Config
from paceline.errors import LayoutError, TrainError
from paceline.plan.layout import Degrees

_OVERLAPS = 1  # torch's number for a tensor with several elements in one place
_SHOWN = 4


def require_initialized(model: nn.Module) -> None:
    """For every layout: before anything reads shapes."""
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
    if lazy:
        raise TrainError(
            "lazy-parameters",
            f"Not initialized yet: {_some(lazy)}.",
            why="a lazy module creates its parameters in its first forward, but the optimizer and all ranks need them "
            "before",
            fix="run the model once before creating the optimizer and the Trainer: model(inputs)",
        )
    expanded = [name for name, p in model.named_parameters() if torch._debug_has_internal_overlap(p) == _OVERLAPS]
    if expanded:
        raise TrainError(
            "expanded-parameter",
            f"Several elements share one place in memory: {_some(expanded)}.",
            why="an expanded tensor can't be updated in place",
            fix="make it contiguous, nn.Parameter(tensor.expand(…).contiguous()), or expand it in the forward",
        )


def require_replicated_criterion(criterion: nn.Module | None, config: Config, degrees: Degrees) -> None:
    parameters = () if criterion is None else criterion.named_parameters()
    names = [name for name, parameter in parameters if parameter.requires_grad]
    if names and not (degrees.is_replicated and not config.fixed_order and config.sync is None):
        raise LayoutError(
            "criterion-parameters",
            f"{type(criterion).__name__} has trainable parameters of its own: {', '.join(names[:4])}.",
            why="a criterion is not sharded, divided into stages, or reduced in a fixed order or in rounds",
            fix='use strategy="ddp"; or make the criterion a submodule of the model, whose forward returns the loss',
        )


def require_supported(model: nn.Module, config: Config, degrees: Degrees) -> None:
    """For the layout of this run."""
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if sparse and (degrees.world > 1 or config.fixed_order):
        raise LayoutError(
            "sparse-gradients",
            f"Sparse gradients are not supported on several ranks or with deterministic: everywhere: {_some(sparse)}.",
            why="FSDP can't reduce them, and DDP scales dense gradients wrongly if sparse ones are ready first",
            fix="create the embedding with sparse=False",
        )
    if sparse and (config.clip_norm is not None or config.clip_value is not None or config.nonfinite != "raise"):
        raise TrainError(
            "sparse-clipping",
            f"Gradients of {_some(sparse)} are sparse, but clip_norm, clip_value or nonfinite needs their norm.",
            why="torch computes neither norms nor limits of sparse tensors",
            fix="create the embedding with sparse=False, or remove the setting",
        )
    norms = [name for name, part in model.named_modules() if _keeps_statistics(part, model)]
    if norms and config.fixed_order:
        raise LayoutError(
            "everywhere-and-batchnorm",
            f"deterministic: everywhere does not support layers with statistics over samples: {_some(norms)}.",
            why="they are computed over the samples of all ranks, or change with every slice that a rank computes",
            fix="use GroupNorm or LayerNorm, freeze them (eval mode, in a model in training mode), or set "
            "deterministic: true",
        )
    shared = [] if degrees.is_replicated else _sharing_memory(list(model.named_parameters()))
    if shared:
        raise LayoutError(
            "shared-memory",
            f"Different parameters share memory: {_some(shared)}.",
            why="each is sharded or moved by itself, so they would no longer change together",
            fix='assign the same nn.Parameter in both places (ties are kept), clone() one, or use strategy="ddp"',
        )


def _keeps_statistics(module: nn.Module, model: nn.Module) -> bool:
    """A batch norm that is not frozen, or an instance norm with running statistics."""
    kept = isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.running_mean is not None)
    return kept and (module.training or not model.training)


def _sharing_memory(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Parameters of which some elements are in the same place as those of another."""
    storages: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in named:
        if tensor.device.type != "meta" and tensor.numel():
            storages[tensor.untyped_storage().data_ptr()].append((name, tensor))
    found = []
    for members in storages.values():
        spans = sorted(((_span(tensor), name, tensor) for name, tensor in members), key=lambda each: each[:2])
        for ((_, stop), name, tensor), ((start, _), other, second) in pairwise(spans):
            if start < stop and _overlap(tensor, second):
                found += [name, other]
    return list(dict.fromkeys(found))


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and the one after the last, in the storage."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _overlap(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype:
        return True
    length = max(_span(first)[1], _span(second)[1]) // first.element_size()
    places = torch.zeros(length, dtype=torch.uint8)
    for tensor in (first, second):
        places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).add_(1)
    return int(places.max()) > 1


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
