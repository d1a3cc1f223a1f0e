"""Batches as users have them: tensors inside tuples, lists and dicts, of which the first dim counts the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.errors import DataError


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)


def samples_in(batch: Any) -> int:
    """The length of a batch: the first dim of the first tensor in it."""
    for tensor in tensors_in(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise DataError(
        "no-length",
        f"A batch of type {type(batch).__name__} holds no tensor whose first dim counts its samples.",
        fix="give tensors, or tuples, lists and dicts of tensors",
    )


def apply(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with each tensor changed, its containers kept."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return type(batch)({key: apply(value, change) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(apply(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(apply(value, change) for value in batch)
    return batch


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Some samples of a ready batch."""
    return apply(batch, lambda tensor: tensor[start:stop] if tensor.dim() else tensor)
