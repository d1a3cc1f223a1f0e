"""The outputs for all samples, assembled from the batches of all ranks in the order of the data.

Outputs are tensors with samples along the first dim, or lists of one item per sample, nested in tuples, lists and
dicts. Rows of one shape are concatenated to a tensor. Where their shapes differ, because batches are padded to their
own length or a detector finds another number of boxes, the result is a list of one item per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.data.gathered_rows import gather_rows, kinds_of
from paceline.data.loader import no_samples
from paceline.errors import TrainError
from paceline.runtime import collectives

Column = list[Any]  # one part of the outputs: a tensor, or a list of items, for every batch
_PLAIN = (bool, int, float, str, type(None))


def gather_outputs(batches: list[tuple[Any, int]], positions: list[int], device: torch.device) -> Any:
    """Gather (outputs, samples) of each batch on the CPU of every rank. `positions` are those of the samples in the
    data. Collective: must be called on every rank."""
    readings = [_read(batches, is_items) for is_items in _READINGS]
    own = {"readings": [[each.structure, each.problem, each.kinds] for each in readings], "positions": positions}
    reports = collectives.all_gather_object(own)
    known = [report["readings"] for report in reports if report["positions"]]
    if not known:
        raise no_samples()
    chosen = _choose([[rank[number] for rank in known] for number in range(len(_READINGS))])
    columns, structure = readings[chosen].columns, known[0][chosen][0]
    order = torch.tensor([place for report in reports for place in report["positions"]]).argsort()
    counts = [len(report["positions"]) for report in reports]
    results: list[Any] = []
    for number, kind in enumerate(known[0][chosen][2]):
        column = columns[number] if batches else []
        if kind is not None and all(rank[chosen][2][number] == kind for rank in known):
            dtype, shape = kind
            rows = torch.cat(column) if column else torch.empty((0, *shape), dtype=getattr(torch, dtype))
            results.append(gather_rows(rows, counts, device, keeps=True)[order])
        else:
            items = _gather_items([item for part in column for item in part], device)
            results.append([items[place] for place in order.tolist()])
    return _restore(structure, results.__getitem__, batches[0][0] if batches else None)


class _Reading(NamedTuple):
    """The structure of this rank's outputs, their parts, and what is wrong with them."""

    structure: Any
    columns: list[Column]
    problem: str = ""

    @property
    def kinds(self) -> list[Any]:
        return [_kind(column) for column in self.columns]


def _read(batches: list[tuple[Any, int]], is_items: Callable[[list[Any], int], bool]) -> _Reading:
    structure: Any = None
    columns: list[Column] = []
    for outputs, samples in batches:
        parts: list[Any] = []
        try:
            found = _describe(outputs, partial(_as_part, samples=samples, parts=parts, is_items=is_items))
            for part in parts:
                _encode_items(part if isinstance(part, list) else [], [])
        except _BadOutputError as error:
            return _Reading(None, [], str(error))
        if columns and found != structure:
            return _Reading(None, [], "batches have outputs of different structure")
        structure = found
        columns = columns or [[] for _ in parts]
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    return _Reading(structure, columns)


def _choose(readings: list[list[Any]]) -> int:
    """The first reading that fits the outputs of all ranks. `readings` has (structure, problem, kinds) of each rank."""
    problems = []
    for number, ranks in enumerate(readings):
        own = [problem for _, problem, _ in ranks if problem]
        if not own and all(structure == ranks[0][0] for structure, _, _ in ranks):
            return number
        problems += own or ["ranks have outputs of different structure"]
    raise TrainError(
        "bad-outputs",
        f"The outputs can't be assigned to samples: {problems[0]}.",
        why="predictions are in the order of the data, so every output needs a row or an item for each sample",
        fix="return tensors with samples along the first dim, or lists of one item per sample, in tuples and dicts",
    )


class _BadOutputError(Exception):
    """What is wrong with an output, for the error that all ranks raise."""


def _as_part(value: Any, samples: int, parts: list[Any], is_items: Callable[[list[Any], int], bool]) -> int | None:
    """Add `value` to the parts if it has a row or an item for each sample. Returns its number; None: look inside."""
    if isinstance(value, Tensor):
        if not value.dim() or len(value) != samples:
            raise _BadOutputError(f"a batch of {samples} samples has an output of shape {tuple(value.shape)}")
    elif not isinstance(value, list) or len(value) != samples or not is_items(value, samples):
        return None
    parts.append(value)
    return len(parts) - 1


def _has_no_rows(items: list[Any], samples: int) -> bool:
    """Whether the list has dicts, or tensors without samples along the first dim. Their sizes may agree by chance."""
    return any(not isinstance(item, Tensor) or not item.dim() or len(item) != samples for item in items)


# Lists have no items of samples; some have, by what is in them; all have if they are as long as the batch.
_READINGS: list[Callable[[list[Any], int], bool]] = [lambda *_: False, _has_no_rows, lambda *_: True]


def _kind(column: Column) -> list[Any] | None:
    """The dtype and the shape of a row, as plain values; None if rows differ or are no tensors."""
    if not all(isinstance(part, Tensor) for part in column):
        return None
    kinds = kinds_of(column)
    return kinds[0] if all(kind == kinds[0] for kind in kinds) else None


def _gather_items(items: list[Any], device: torch.device) -> list[Any]:
    """The items of all ranks, rank by rank."""
    tensors: list[Tensor] = []
    encoded = _encode_items(items, tensors)
    flat = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    data = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    reports = collectives.all_gather_object({"items": encoded, "bytes": len(data)})
    received = gather_rows(data, [report["bytes"] for report in reports], device, keeps=True)
    place = 0

    def take(kind: list[Any]) -> Tensor:
        nonlocal place
        dtype, shape = getattr(torch, kind[0]), torch.Size(kind[1])
        begin, place = place, place + shape.numel() * dtype.itemsize
        # Copied: the bytes of a tensor need not be aligned to its dtype, and would keep all others alive.
        return received[begin:place].clone().view(dtype).reshape(shape)

    return [_restore(item, take) for report in reports for item in report["items"]]


def _encode_items(items: list[Any], tensors: list[Tensor]) -> list[Any]:
    """The items as plain values; their tensors are added to `tensors`."""

    def leaf(value: Any) -> list[Any] | None:
        if not isinstance(value, Tensor):
            return None
        tensors.append(value)
        return [str(value.dtype).removeprefix("torch."), list(value.shape)]

    return [_describe(item, leaf) for item in items]


def _describe(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Containers as plain values. `leaf` returns the description of a leaf, and None for other values."""
    found = leaf(value)
    if found is not None:
        return {"leaf": found}
    if isinstance(value, Mapping):
        return {"dict": [[_describe(key, leaf), _describe(inner, leaf)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_describe(inner, leaf) for inner in value]}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise _BadOutputError(f"they contain a {type(value).__module__}.{type(value).__qualname__}")


def _restore(described: Any, leaf: Callable[[Any], Any], like: Any = None) -> Any:
    """The inverse of `_describe`. Named tuples get the class of `like`."""
    [(kind, content)] = described.items()
    if kind == "leaf":
        return leaf(content)
    if kind == "value":
        return content
    if kind == "dict":
        pairs = [(_restore(key, leaf), inner) for key, inner in content]
        inside = like if isinstance(like, Mapping) else {}
        return {key: _restore(inner, leaf, inside.get(key)) for key, inner in pairs}
    parts = like if isinstance(like, (list, tuple)) else [None] * len(content)
    values = [_restore(inner, leaf, part) for inner, part in zip(content, parts, strict=True)]
    if kind == "tuple":
        return type(like)(*values) if hasattr(like, "_fields") else tuple(values)
    return values
