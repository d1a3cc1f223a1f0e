"""Copies tensors to host memory while training continues.

Weights, optimizer state and averages change only when the optimizer steps, so they can be copied during the next
forward and backward: CPU tensors by a thread, if a core is free; CUDA tensors on a separate stream into page-locked
memory, by a thread as well, because the GPU has nothing to do until the training thread starts the next forward. Call
`wait_for_copy` before they change. Volatile tensors, which a forward may change (buffers, random state), are copied
before `begin` returns. On a GPU, small ones are copied on the GPU, which the training thread does not wait for.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from paceline.checkpoint.planner import WriteItem
from paceline.checkpoint.shard_file import FileLayout

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 256 << 10  # bytes; tensors of a GPU up to this size are concatenated there and copied together
_ALIGNMENT = 8
PIECE = 512 << 20  # bytes that are page-locked at a time, in 11 ms; each waits for the driver's lock
_PORTABLE = 1  # a flag of cudaHostRegister: for every GPU of this process


Allocate = Callable[[int], Any]  # a writable buffer of at least so many bytes


def map_memory(size: int) -> mmap.mmap:
    """Memory of this process, which takes no pages until it is used."""
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    # Not MADV_DONTFORK, although workers of a DataLoader copy locked pages: it leaves a hole in a forked process, where
    # the kernel places other mappings, which go when the process drops its reference to this one.
    return mapped


class HostCopy:
    """A host buffer for the items of one file, reused by later saves."""

    def __init__(self, layout: FileLayout, devices: Collection[torch.device], allocate: Allocate = map_memory) -> None:
        self.layout, self._devices = layout, set(devices)
        self._gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
        self._memory = HostMemory(layout.size + _ALIGNMENT, self._gpus[0] if self._gpus else None, allocate)
        self._streams = {device: torch.cuda.Stream(device) for device in self._gpus}
        self._copy_events = {device: torch.cuda.Event() for device in self._gpus}
        self._thread = ThreadPoolExecutor(1, "paceline-copy", initializer=partial(_use_first, self._gpus))
        self._prepared: Future[None] | None = None
        self._pending: Future[None] | None = None
        self._placed_for: tuple[Any, ...] = ()
        self._starts: list[int] = []  # of the items in the memory
        self._small: dict[tuple[torch.device, bool], list[int]] = {}  # items by GPU and volatility
        self._large: dict[tuple[torch.device, bool], list[int]] = {}
        self._concatenated: list[Tensor] = []  # kept until they are copied

    def adopt(self, layout: FileLayout, devices: Collection[torch.device]) -> bool:
        """Use the memory for another layout, if it is large enough."""
        if set(devices) != self._devices or layout.size + _ALIGNMENT > self._memory.bytes.numel():
            return False
        if layout is not self.layout:
            self.layout, self._placed_for = layout, ()
        return True

    def prepare(self) -> None:
        """Start to allocate the memory for copies from a GPU, on a thread. Copies from a CPU allocate it themselves."""
        if self._gpus and self._prepared is None:
            pool = ThreadPoolExecutor(1, "paceline-memory", initializer=lower_priority)
            self._prepared = pool.submit(self._memory.prepare)
            pool.shutdown(wait=False)

    @property
    def is_ready(self) -> bool:
        return self._prepared is None or self._prepared.done()

    @torch.no_grad()
    def begin(self, tensors: Sequence[Tensor], volatile: Collection[int]) -> None:
        """Copy each item from its tensor. Indices in `volatile` are copied before this returns."""
        self.prepare()
        if self._prepared is not None:
            self._prepared.result()
        devices = [tensor.device for tensor in tensors]
        if self._placed_for != (devices, volatile):
            self._place(devices, volatile)
            self._placed_for = (devices, volatile)
        for device in self._gpus:
            self._begin_volatile(device, tensors)
        deferred: list[tuple[Tensor, Tensor]] = []
        for index, tensor in enumerate(tensors):
            if devices[index].type != "cuda":
                pair = self._buffer(index), tensor.view(_SAME_SIZE[tensor.dtype.itemsize])
                if index in volatile:
                    pair[0].copy_(pair[1])
                else:
                    deferred.append(pair)
        if _cores_are_busy():
            for target, source in deferred:
                target.copy_(source)
            deferred = []
        if deferred or self._gpus:
            self._pending = self._thread.submit(self._copy_deferred, tensors, deferred)

    def _place(self, devices: list[torch.device], volatile: Collection[int]) -> None:
        """The small items of each GPU come first, next to each other; all others in the order of the file."""
        items = self.layout.items
        self._small = {(device, first): [] for device in self._gpus for first in (True, False)}
        self._large = {key: [] for key in self._small}
        for index, device in enumerate(devices):
            if device.type == "cuda":
                (self._small if _size(items[index]) <= _SMALL else self._large)[device, index in volatile].append(index)
        small = [index for indices in self._small.values() for index in indices]
        at, self._starts = 0, [0] * len(items)
        for index in small:
            self._starts[index] = at
            at += _size(items[index])
        at += -at % _ALIGNMENT
        for index in sorted(set(range(len(items))).difference(small)):
            self._starts[index] = at
            at += _size(items[index])

    def _begin_volatile(self, device: torch.device, tensors: Sequence[Tensor]) -> None:
        stream, small, large = self._streams[device], self._small[device, True], self._large[device, True]
        if small:  # now, on the current stream
            self._concatenated.append(torch.cat([_flat(tensors[index]) for index in small]))
        stream.wait_stream(torch.cuda.current_stream(device))
        if small or large:
            with torch.cuda.stream(stream):
                if small:
                    self._copy_pieces(self._starts[small[0]], self._concatenated[-1])
                for index in large:
                    self._copy_pieces(self._starts[index], _flat(tensors[index]))
            if large:  # frozen parameters: a copy on the GPU might not fit
                stream.synchronize()

    @torch.no_grad()
    def _copy_deferred(self, tensors: Sequence[Tensor], on_cpu: list[tuple[Tensor, Tensor]]) -> None:
        for device, stream in self._streams.items():
            with torch.cuda.stream(stream):
                if small := self._small[device, False]:
                    self._copy_pieces(self._starts[small[0]], torch.cat([_flat(tensors[index]) for index in small]))
                for index in self._large[device, False]:
                    self._copy_pieces(self._starts[index], _flat(tensors[index]))
                self._copy_events[device].record(stream)
        _copy_all(on_cpu)

    def _copy_pieces(self, start: int, source: Tensor) -> None:
        """Pieces are locked separately, and a copy into two of them would fail."""
        at, end = start, start + source.numel()
        while at < end:
            stop = min(end, (at // PIECE + 1) * PIECE)
            self._memory.bytes[at:stop].copy_(source[at - start : stop - start], non_blocking=True)
            at = stop

    def wait_for_copy(self) -> None:
        """Return when the tensors may change. Blocks on CPU copies only: for GPU copies, the current stream waits."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        for device, event in self._copy_events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def finish(self) -> None:
        """Wait until every byte is in host memory."""
        if (pending := self._pending) is not None:
            pending.result()
        for event in self._copy_events.values():
            event.synchronize()
        self._concatenated.clear()

    def _slice(self, index: int) -> Tensor:
        start = self._starts[index]
        return self._memory.bytes[start : start + _size(self.layout.items[index])]

    def _buffer(self, index: int) -> Tensor:
        """The slice of an item, as integers of its width, because numpy has neither bfloat16 nor float8."""
        item = self.layout.items[index]
        return self._slice(index).view(_SAME_SIZE[item.dtype.itemsize]).view(item.sizes)

    def item_bytes(self, index: int) -> memoryview:
        return self._slice(index).numpy().data

    def close(self) -> None:
        """Call when no save is in progress."""
        self._memory.stop()
        if self._prepared is not None:
            self._prepared.exception()
        self._thread.shutdown(wait=True)
        self._memory.unlock()


def _use_first(gpus: Sequence[torch.device]) -> None:
    """A new thread would open the first GPU of the machine, even if another rank uses it."""
    if gpus:
        torch.cuda.set_device(gpus[0])


def _size(item: WriteItem) -> int:
    return prod(item.sizes) * item.dtype.itemsize


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in the order of the file."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _cores_are_busy() -> bool:
    """If the forward uses every core, a concurrent copy slows it down more than a synchronous one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return torch.get_num_threads() >= cores


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        numpy.copyto(target.numpy(), source.numpy())


class HostMemory:
    """`size` bytes, page-locked if they are for a GPU. Use them when `prepare` has returned."""

    def __init__(self, size: int, gpu: torch.device | None, allocate: Allocate = map_memory) -> None:
        self.bytes = torch.frombuffer(allocate(size), dtype=torch.uint8, count=size)
        self._gpu, self._is_stopped = gpu, False
        self._locked: list[int] = []  # addresses
        self.unlock = weakref.finalize(self, _unlock, self._locked)
        self.unlock.atexit = False

    def prepare(self) -> None:
        """Let the system allocate the pages, and lock them."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # of this thread, which would use the first GPU otherwise
        for piece in self.bytes.split(PIECE):
            if self._is_stopped:
                return
            piece.numpy().fill(0)  # on one thread, and without the GIL
            if self._gpu is not None and _lock(piece):
                self._locked.append(piece.data_ptr())

    def stop(self) -> None:
        """End a `prepare` of another thread early."""
        self._is_stopped = True


def _lock(piece: Tensor) -> bool:
    """If this fails (a limit on locked memory), copies block the training thread, but are correct."""
    return int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), _PORTABLE)) == 0


def _unlock(addresses: list[int]) -> None:
    while addresses:
        torch.cuda.cudart().cudaHostUnregister(addresses.pop())


def lower_priority() -> None:
    """Give training precedence over this thread if there are few cores. (On Linux, each thread has its priority.)"""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
