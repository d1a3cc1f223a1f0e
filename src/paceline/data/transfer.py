"""Micro-batches on their way to the device: one ahead, on a stream of its own, so that copies hide behind compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from paceline.data.batches import apply, tensors_in
from paceline.data.loader import Micro


def to_device(micros: Iterator[Micro], device: torch.device, cast: Callable[[Tensor], Tensor]) -> Iterator[Micro]:
    """Each micro-batch on `device`, in the numbers that `cast` gives."""
    if device.type == "cuda":
        return _prefetched(micros, device, cast)
    return (replace(micro, batch=apply(micro.batch, lambda tensor: cast(tensor.to(device)))) for micro in micros)


def _prefetched(micros: Iterator[Micro], device: torch.device, cast: Callable[[Tensor], Tensor]) -> Iterator[Micro]:
    side = torch.cuda.Stream(device)

    def copied(micro: Micro) -> Micro:
        with torch.cuda.stream(side):
            batch = apply(micro.batch, lambda tensor: cast(tensor.to(device, non_blocking=True)))
        return replace(micro, batch=batch)

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
