"""Compares what ranks are about to train, before a wrapper moves data.

DDP and FSDP take for granted that every rank has the same parameters in the same order. If not, they hang, abort or
mix parameters. So ranks exchange a digest first, and the details only if it differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batches import tensors_in
from paceline.errors import DataError, WorldError
from paceline.parallel.optimizer_binding import names_of
from paceline.runtime import collectives
from paceline.text import by_rank

Facts = list[tuple[str, str]]  # (what, its description), in the order in which collectives use them


def require_same_model(model: nn.Module, optimizer: torch.optim.Optimizer | None, criterion: Any) -> None:
    """Raise unless all ranks have the same modules, parameters, buffers and optimizer. Collective."""
    if collectives.world() == 1:
        return
    found = _first_difference([*_model_facts(model), *_optimizer_facts(model, optimizer), *_criterion_facts(criterion)])
    if found is not None:
        raise WorldError(
            "different-models",
            f"Ranks have different models, first:\n{by_rank(found)}",
            why="collectives match parameters by their order, so gradients of different parameters would be mixed",
            fix="build the same model and optimizer on every rank; look for code that depends on the rank, on files "
            "of one node, or on unseeded random numbers",
        )


def require_same_structure(batch: Any) -> None:
    """Raise unless the batches of all ranks have the same keys, and tensors of the same kind. Collective."""
    found = _first_difference(list(_structure(batch, "batch")))
    if found is not None:
        raise DataError(
            "different-structure",
            f"Ranks received batches of different structure, first:\n{by_rank(found)}",
            why="ranks must run the same operations on their samples, or their collectives do not match",
            fix="return samples of the same structure for every index, and collate them equally on every rank",
        )


def _first_difference(facts: Facts) -> list[str] | None:
    """The first fact that differs, as each rank has it."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if len(set(collectives.all_gather_object(digest))) == 1:
        return None
    for rows in zip_longest(*collectives.all_gather_object(facts)):
        if any(row != rows[0] for row in rows):
            return ["(nothing)" if row is None else " ".join(row).rstrip() for row in rows]
    return None


def _model_facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in model.named_parameters():
        trained = "" if parameter.requires_grad else ", frozen"
        yield f"parameter {name}:", f"{_describe(parameter)}{trained}"
    yield "no other parameter", ""
    for name, buffer in model.named_buffers():
        yield f"buffer {name}:", _describe(buffer)
    yield "no other buffer", ""
    for name, module in model.named_modules():
        yield f"module {name or '(the model)'}:", type(module).__qualname__


def _optimizer_facts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, str]]:
    if optimizer is None:
        return
    names = names_of(model.named_parameters())
    yield "optimizer:", type(optimizer).__qualname__
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: _setting(value) for key, value in group.items() if key != "params"}
        yield f"optimizer group {number}:", ", ".join(f"{key}={value}" for key, value in settings.items())
        for parameter in group["params"]:
            yield f"optimizer group {number} parameter:", names.get(id(parameter), "(not in the model)")


def _criterion_facts(criterion: Any) -> Iterator[tuple[str, str]]:
    if criterion is not None:
        yield "criterion:", type(criterion).__qualname__


def _setting(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.numel() == 1 else _describe(value)
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else type(value).__name__


def _structure(batch: Any, where: str) -> Iterator[tuple[str, str]]:
    """Shapes and the lengths of lists are left out: they may depend on the samples."""
    if isinstance(batch, Tensor):
        yield f"{where}:", f"tensor with {batch.dim()} dims, {_dtype(batch)}"
    elif isinstance(batch, Mapping):
        yield f"{where}:", f"keys {', '.join(map(str, batch))}"
        for key, value in batch.items():
            yield from _structure(value, f"{where}[{key!r}]")
    elif isinstance(batch, tuple) or (isinstance(batch, list) and len({type(each) for each in batch}) > 1):
        yield f"{where}:", f"{type(batch).__name__} of {len(batch)}"
        for number, value in enumerate(batch):
            yield from _structure(value, f"{where}[{number}]")
    elif isinstance(batch, list) and batch and any(True for _ in tensors_in(batch)):
        yield from _structure(batch[0], f"{where}[0]")


def _describe(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape)) or 'scalar'}, {_dtype(tensor)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
