"""Many tensors as one flat one, in pieces of limited size: one collective moves all tensors of a piece.

    flat = FlatTensors(weights)              # names → tensors of one dtype and device
    outer = flat.pack(flat.whole)            # a copy of all elements
    for piece in flat.pieces:
        change = flat.pack(piece) - outer[piece]
        flat.unpack(piece, change)

Elements are in the order of memory, which is the same on every replica, so tensors of any memory format are views. A
complex number is two elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

# What a round needs of additional memory is a small multiple of this. Pieces of 4 MiB stay in the cache of a CPU: a
# round takes a third of the CPU time that it takes with 64 MiB.
_CPU_BYTES, _GPU_BYTES = 4 << 20, 64 << 20


class FlatTensors:
    """`tensors`: of one dtype and device, without gaps in memory. They are read when used, so a parameter may get
    another memory in between."""

    def __init__(self, tensors: Mapping[str, Tensor], piece_bytes: int | None = None) -> None:
        self.tensors = dict(tensors)
        *self._starts, end = accumulate(map(_length, self.tensors.values()), initial=0)
        self.whole = slice(0, end)
        first = next(iter(self.tensors.values()))
        # Averages of half precision weights are computed in float32.
        self.dtype = torch.promote_types(first.dtype, torch.float32).to_real()
        size = piece_bytes or (_CPU_BYTES if first.device.type == "cpu" else _GPU_BYTES)
        length = max(1, size // self.dtype.itemsize)
        self.pieces = [slice(start, min(start + length, end)) for start in range(0, end, length)]

    def pack(self, piece: slice) -> Tensor:
        """A new flat tensor of these elements."""
        parts = self._parts(piece)
        return torch.cat(parts).to(self.dtype) if parts else torch.empty(0, dtype=self.dtype)

    def unpack(self, piece: slice, flat: Tensor) -> None:
        """Copy the elements back."""
        parts = self._parts(piece)
        torch._foreach_copy_(parts, list(flat.split([len(part) for part in parts])))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat tensor of all elements, by name, in the shapes of the tensors."""
        found = {}
        for (name, tensor), start in zip(self.tensors.items(), self._starts, strict=True):
            part = flat[start : start + _length(tensor)]
            part = torch.view_as_complex(part.view(-1, 2)) if tensor.is_complex() else part
            found[name] = part.as_strided(tensor.shape, tensor.stride())
        return found

    def _parts(self, piece: slice) -> list[Tensor]:
        found = []
        for tensor, start in zip(self.tensors.values(), self._starts, strict=True):
            low, high = max(piece.start, start), min(piece.stop, start + _length(tensor))
            if low < high:
                found.append(_in_memory_order(tensor.detach())[low - start : high - start])
        return found


def by_kind(tensors: Mapping[str, Tensor]) -> list[FlatTensors]:
    """One for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return [FlatTensors(same) for same in kinds.values()]


def has_mean(tensor: Tensor) -> bool:
    """Whether it may be averaged: integers may not."""
    return tensor.is_floating_point() or tensor.is_complex()


def has_gaps(tensor: Tensor) -> bool:
    """Whether elements of the tensor are not consecutive in memory, in any order of its dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return True
            expected *= size
    return False


def _length(tensor: Tensor) -> int:
    return tensor.numel() * (1 + tensor.is_complex())


def _in_memory_order(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if tensor.is_complex() else flat
