"""Batches: tensors nested in tuples, lists and dicts, with samples along the first dim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch

from paceline.errors import DataError


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)


def samples_in(batch: Any) -> int:
    """The length of a batch: the first dim of the first tensor in it."""
    if type(batch) in (tuple, list) and batch and type(batch[0]) is torch.Tensor and batch[0].dim():
        return batch[0].shape[0]  # fast path for the common case
    for tensor in tensors_in(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise DataError(
        "no-length",
        f"A batch of type {type(batch).__name__} contains no tensor with a batch dim.",
        fix="use tensors, or tuples, lists and dicts of tensors",
    )


def apply(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor, keeping the containers."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: apply(value, change) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        return _like(batch, [apply(value, change) for value in batch])
    return batch


def digest(batch: Any) -> int:
    """A checksum of the tensors in a batch."""
    total = 0
    for tensor in tensors_in(batch):
        bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        total = crc32(bits.numpy().tobytes(), total)
    return total


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Slice a batch: rows of everything as long as the batch, all of anything else (such as class weights)."""
    if type(batch) in (tuple, list) and all(type(part) is torch.Tensor and part.dim() for part in batch):
        length = batch[0].shape[0]
        if all(part.shape[0] == length for part in batch):  # fast path for the common case
            return type(batch)([part[start:stop] for part in batch])
    length = samples_in(batch)
    return batch if (start, stop) == (0, length) else _rows(batch, start, stop, length)


def _rows(batch: Any, start: int, stop: int, length: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() and batch.shape[0] == length else batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: _rows(value, start, stop, length) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        if any(isinstance(value, (torch.Tensor, Mapping, list, tuple)) for value in batch):
            return _like(batch, [_rows(value, start, stop, length) for value in batch])
        return batch[start:stop] if len(batch) == length else batch  # for example a list of file names
    return batch


def _like(batch: Any, values: Any) -> Any:
    """A container of the same type with other values."""
    if isinstance(batch, Mapping):
        if not hasattr(batch, "__setitem__"):
            return values
        same_kind = copy.copy(batch)
        for key, value in values.items():
            same_kind[key] = value
        return same_kind
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
