"""Micro-batches on their way to the device: one ahead, on a stream of its own, so that copies hide behind compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.data.batches import apply, tensors_in
from paceline.data.loader import Micro


def to_device(
    micros: Iterator[Micro], device: torch.device, cast: Callable[[Tensor], Tensor] | None
) -> Iterator[Micro]:
    """Each micro-batch on `device`, in the numbers that `cast` gives (None: those it has)."""
    if device.type == "cuda":
        return _prefetched(micros, device, cast)
    return _moved(micros, device, cast)


def _moved(micros: Iterator[Micro], device: torch.device, cast: Callable[[Tensor], Tensor] | None) -> Iterator[Micro]:
    for micro in micros:
        if cast is not None or any(tensor.device != device for tensor in tensors_in(micro.batch)):
            micro.batch = apply(micro.batch, lambda tensor: _changed(tensor.to(device), cast))
        yield micro


def _changed(tensor: Tensor, cast: Callable[[Tensor], Tensor] | None) -> Tensor:
    return tensor if cast is None else cast(tensor)


def _prefetched(
    micros: Iterator[Micro], device: torch.device, cast: Callable[[Tensor], Tensor] | None
) -> Iterator[Micro]:
    side = torch.cuda.Stream(device)

    def copied(micro: Micro) -> Micro:
        with torch.cuda.stream(side):
            micro.batch = apply(micro.batch, lambda tensor: _changed(tensor.to(device, non_blocking=True), cast))
        return micro

    ahead: Micro | None = None
    for micro in micros:
        following = copied(micro)
        if ahead is not None:
            yield _arrived(ahead, side, device)
        ahead = following
    if ahead is not None:
        yield _arrived(ahead, side, device)


def _arrived(micro: Micro, side: torch.cuda.Stream, device: torch.device) -> Micro:
    """Compute waits for the copy, and the allocator learns that compute uses the memory."""
    compute = torch.cuda.current_stream(device)
    compute.wait_stream(side)
    for tensor in tensors_in(micro.batch):
        tensor.record_stream(compute)
    return micro
