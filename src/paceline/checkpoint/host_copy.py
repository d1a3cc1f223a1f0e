"""Copies tensors to host memory while training continues.

Weights, optimizer state and averages change only when the optimizer steps, so they can be copied during the next
forward and backward: CPU tensors by a thread, if a core is free; CUDA tensors on a separate stream into pinned memory.
Call `wait_for_copy` before they change. Volatile tensors, which a forward may change (buffers, random state), are
copied before `begin` returns.
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
    """A host buffer for the items of one file, reused by later saves."""

    def __init__(self, layout: FileLayout, devices: Collection[torch.device]) -> None:
        self.layout = layout
        self._gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
        self._memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=bool(self._gpus))
        self._streams = {device: torch.cuda.Stream(device) for device in self._gpus}
        self._copy_events = {device: torch.cuda.Event() for device in self._gpus}
        self._thread = ThreadPoolExecutor(1, "paceline-copy")
        self._pending: Future[None] | None = None

    def _buffer(self, index: int) -> Tensor:
        """The slice of an item, as integers of its width, because numpy has neither bfloat16 nor float8."""
        item, start = self.layout.items[index], self.layout.starts[index]
        size = prod(item.sizes) * item.dtype.itemsize
        return self._memory[start : start + size].view(_SAME_SIZE[item.dtype.itemsize]).view(item.sizes)

    def begin(self, tensors: Sequence[Tensor], volatile: Collection[int]) -> None:
        """Copy each item from its tensor. Indices in `volatile` are copied before this returns."""
        deferred: list[tuple[Tensor, Tensor]] = []
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for index, tensor in enumerate(tensors):
            source = tensor.detach().view(_SAME_SIZE[tensor.dtype.itemsize])
            if tensor.device.type == "cuda":
                with torch.cuda.stream(self._streams[tensor.device]):
                    self._buffer(index).copy_(source, non_blocking=True)
                    if index in volatile:
                        # A short wait, since these tensors are small.
                        self._streams[tensor.device].synchronize()
            elif index in volatile:
                self._buffer(index).copy_(source)
            else:
                deferred.append((self._buffer(index), source))
        for device, stream in self._streams.items():
            self._copy_events[device].record(stream)
        if _cores_are_busy():
            for target, source in deferred:
                target.copy_(source)
        elif deferred:
            # numpy copies on one thread and releases the GIL; torch would start a second thread pool.
            self._pending = self._thread.submit(_copy_all, deferred)

    def wait_for_copy(self) -> None:
        """Return when the tensors may change. Blocks on CPU copies only: for GPU copies, the current stream waits."""
        for device, event in self._copy_events.items():
            torch.cuda.current_stream(device).wait_event(event)
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def finish(self) -> None:
        """Wait until every byte is in host memory."""
        pending = self._pending
        if pending is not None:
            pending.result()
        for event in self._copy_events.values():
            event.synchronize()

    def item_bytes(self, index: int) -> memoryview:
        return bytes_of(self._buffer(index))

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _cores_are_busy() -> bool:
    """If the forward uses every core, a concurrent copy slows it down more than a synchronous one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return torch.get_num_threads() >= cores


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        numpy.copyto(target.numpy(), source.numpy())
