"""Host memory for the copies of a save, allocated ahead of the first one.

`torch.empty(pin_memory=True)` takes 0.4 s per GB, during which no other thread can use the GPU, and rounds the size up
to a power of two. So ordinary memory is touched and then page-locked in pieces, on a thread: that takes 0.2 s per GB,
and other threads wait for one piece at most.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

PIECE = 512 << 20  # bytes that are page-locked at a time, in 11 ms; each waits for the driver's lock
_PORTABLE = 1  # a flag of cudaHostRegister: for every GPU of this process


class HostMemory:
    """`size` bytes, page-locked if they are for a GPU. Use them when `prepare` has returned."""

    def __init__(self, size: int, gpu: torch.device | None) -> None:
        self.bytes = torch.frombuffer(_map(size), dtype=torch.uint8)
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


def _map(size: int) -> mmap.mmap:
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    # Not MADV_DONTFORK, although workers of a DataLoader copy locked pages: it leaves a hole in a forked process, where
    # the kernel places other mappings, which go when the process drops its reference to this one.
    return mapped


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
