"""Copies large micro-batches to the device one step ahead, on a side stream, to overlap copies with compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.data.batches import apply
from paceline.data.loader import MicroBatch

# Bytes of a tensor that are copied on the compute stream: CUDA takes up to 64 KiB at once, even from pageable memory,
# and switching streams takes longer than such a copy.
_SMALL = 1 << 16


Changes = Sequence[Callable[[Tensor], Tensor]]


def to_device(micros: Iterator[MicroBatch], device: torch.device, changes: Changes) -> Iterator[MicroBatch]:
    """Each micro-batch on `device`, with `changes` applied to its tensors, one after the other."""
    if device.type == "cuda":
        return _prefetched(micros, device, changes)
    if device.type == "cpu" and not changes:
        return micros  # already there
    return _moved(micros, device, changes)


def _moved(micros: Iterator[MicroBatch], device: torch.device, changes: Changes) -> Iterator[MicroBatch]:
    for micro in micros:
        micro.batch = apply(micro.batch, lambda tensor: _changed(tensor.to(device), changes))
        yield micro


def _changed(tensor: Tensor, changes: Changes) -> Tensor:
    for change in changes:
        tensor = change(tensor)
    return tensor


def _prefetched(micros: Iterator[MicroBatch], device: torch.device, changes: Changes) -> Iterator[MicroBatch]:
    side, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    copied: list[Tensor] = []  # of one micro-batch, on the side stream
    ahead: tuple[MicroBatch, list[Tensor], torch.cuda.Event] | None = None

    def put(tensor: Tensor) -> Tensor:
        if tensor.device == device or tensor.nbytes <= _SMALL:
            return _changed(tensor.to(device, non_blocking=True), changes)
        with torch.cuda.stream(side):
            copied.append(_changed(tensor.to(device, non_blocking=True), changes))
        return copied[-1]

    for micro in micros:
        copied = []
        if changes or not _is_flat_on(device, micro.batch):
            micro.batch = apply(micro.batch, put)
        done = side.record_event() if copied else None
        if ahead is not None:
            yield _arrived(*ahead, compute)
        ahead = None if done is None else (micro, copied, done)
        if ahead is None:
            yield micro
    if ahead is not None:
        yield _arrived(*ahead, compute)


def _is_flat_on(device: torch.device, batch: Any) -> bool:
    """Whether this is a tuple or list of tensors on the device."""
    parts = batch if type(batch) in (tuple, list) else ()
    return {part.device if type(part) is Tensor else None for part in parts} == {device}


def _arrived(micro: MicroBatch, copied: list[Tensor], done: torch.cuda.Event, compute: torch.cuda.Stream) -> MicroBatch:
    """Make the compute stream wait for this copy only, and record its use of the memory for the allocator."""
    compute.wait_event(done)
    for tensor in copied:
        tensor.record_stream(compute)
    return micro
