"""Memory for messages. Large tensors that are allocated anew in every step cost more time on the CPU than what is done
with them, because the operating system hands out their pages one by one. Buckets are exchanged one after the other, so
that all can use the same memory."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Scratch:
    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def empty(self, use: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, valid until the next call for the same use."""
        needed = prod(size) * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.numel() < needed or memory.device != device:
            memory = self._memory[use] = torch.empty(needed, dtype=torch.uint8, device=device)
        return memory[:needed].view(dtype).view(size)
