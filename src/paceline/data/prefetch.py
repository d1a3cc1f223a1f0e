"""Copies micro-batches to the device one step ahead, on a side stream, to overlap copies with compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.data.batches import apply, tensors_in
from paceline.data.loader import MicroBatch


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
    ahead: tuple[MicroBatch, torch.cuda.Event] | None = None
    for micro in micros:
        with torch.cuda.stream(side):
            micro.batch = apply(micro.batch, lambda tensor: _changed(tensor.to(device, non_blocking=True), cast))
            copied = side.record_event()
        if ahead is not None:
            yield _arrived(*ahead, compute)
        ahead = (micro, copied)
    if ahead is not None:
        yield _arrived(*ahead, compute)


def _arrived(micro: MicroBatch, copied: torch.cuda.Event, compute: torch.cuda.Stream) -> MicroBatch:
    """Make the compute stream wait for this copy only, and record its use of the memory for the allocator."""
    compute.wait_event(copied)
    for tensor in tensors_in(micro.batch):
        tensor.record_stream(compute)
    return micro
