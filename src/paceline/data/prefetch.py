"""Copies large micro-batches to the device one step ahead, on a side stream, to overlap copies with compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.data.batches import apply
from paceline.data.loader import MicroBatch

# Bytes of a tensor that are copied on the compute stream: CUDA takes up to 64 KiB at once, even from pageable memory,
# and switching streams takes longer than such a copy.
_SMALL = 1 << 16


def to_device(
    micros: Iterator[MicroBatch], device: torch.device, cast: Callable[[Tensor], Tensor] | None
) -> Iterator[MicroBatch]:
    """Each micro-batch on `device`, with `cast` applied to its tensors."""
    if device.type == "cuda":
        return _prefetched(micros, device, cast)
    if device.type == "cpu" and cast is None:
        return micros  # already there
    return _moved(micros, device, cast)


def _moved(
    micros: Iterator[MicroBatch], device: torch.device, cast: Callable[[Tensor], Tensor] | None
) -> Iterator[MicroBatch]:
    for micro in micros:
        micro.batch = apply(micro.batch, lambda tensor: _changed(tensor.to(device), cast))
        yield micro


def _changed(tensor: Tensor, cast: Callable[[Tensor], Tensor] | None) -> Tensor:
    return tensor if cast is None else cast(tensor)


def _prefetched(
    micros: Iterator[MicroBatch], device: torch.device, cast: Callable[[Tensor], Tensor] | None
) -> Iterator[MicroBatch]:
    side, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    copied: list[Tensor] = []  # of one micro-batch, on the side stream
    ahead: tuple[MicroBatch, list[Tensor], torch.cuda.Event] | None = None

    def put(tensor: Tensor) -> Tensor:
        if tensor.device == device or tensor.nbytes <= _SMALL:
            moved = tensor.to(device, non_blocking=True)
            return moved if cast is None else cast(moved)
        with torch.cuda.stream(side):
            copied.append(_changed(tensor.to(device, non_blocking=True), cast))
        return copied[-1]

    for micro in micros:
        copied = []
        if cast is not None or not _is_flat_on(device, micro.batch):
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
