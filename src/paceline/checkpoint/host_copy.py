"""A copy of what a checkpoint will hold, made while training goes on.

Weights, optimizer state and averages change only when the optimizer steps, so they can be copied beside the next
forward and backward: on the CPU by a thread, where a core is free for it; from a GPU by a stream of its own into pinned
memory. `settle` has to be called before they change. What a forward may change (buffers, random state) is copied at
once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import numpy
import torch
from torch import Tensor

from paceline.checkpoint.shard_file import FileLayout, bytes_of

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostCopy:
    """Memory for the shares of one file, in the file's order; used again by later saves."""

    def __init__(self, layout: FileLayout, devices: Collection[torch.device]) -> None:
        self.layout = layout
        self._gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
        self._memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=bool(self._gpus))
        self._streams = {device: torch.cuda.Stream(device) for device in self._gpus}
        self._copied = {device: torch.cuda.Event() for device in self._gpus}
        self._thread = ThreadPoolExecutor(1, "paceline-copy")
        self._pending: Future[None] | None = None

    def _room(self, number: int) -> Tensor:
        """Where a share goes, as whole numbers of its width: numpy knows neither bfloat16 nor float8."""
        share, start = self.layout.shares[number], self.layout.starts[number]
        size = prod(share.sizes) * share.dtype.itemsize
        return self._memory[start : start + size].view(_SAME_SIZE[share.dtype.itemsize]).view(share.sizes)

    def begin(self, tensors: Sequence[Tensor], at_once: Collection[int]) -> None:
        """Copy each share from its tensor: those whose numbers are in `at_once` before this returns."""
        later: list[tuple[Tensor, Tensor]] = []
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for number, tensor in enumerate(tensors):
            source = tensor.detach().view(_SAME_SIZE[tensor.dtype.itemsize])
            if tensor.device.type == "cuda":
                with torch.cuda.stream(self._streams[tensor.device]):
                    self._room(number).copy_(source, non_blocking=True)
                    if number in at_once:
                        # A clone's worth of waiting: it is small, and the forward may change it at any time.
                        self._streams[tensor.device].synchronize()
            elif number in at_once:
                self._room(number).copy_(source)
            else:
                later.append((self._room(number), source))
        for device, stream in self._streams.items():
            self._copied[device].record(stream)
        if _cores_are_busy():
            for room, source in later:
                room.copy_(source)
        elif later:
            # numpy copies on one thread and without Python's lock; torch would start a second team of threads.
            self._pending = self._thread.submit(_copy_all, later)

    def wait_for_copy(self) -> None:
        """From here on the tensors may change: GPUs wait by themselves, the host for its own thread only."""
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def finish(self) -> None:
        """Until every byte is here."""
        pending = self._pending
        if pending is not None:
            pending.result()
        for event in self._copied.values():
            event.synchronize()

    def share_bytes(self, number: int) -> memoryview:
        return bytes_of(self._room(number))

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _cores_are_busy() -> bool:
    """Where the forward computes on every core, a copy beside it takes from it more than one on all cores at once."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return torch.get_num_threads() >= cores


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for room, source in pairs:
        numpy.copyto(room.numpy(), source.numpy())
