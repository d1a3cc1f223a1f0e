"""Exact checksums over the bits of weights, computed on their device.

Floating-point sums would depend on the order of additions. Bits are summed as 64-bit integers, which wrap around, in
columns with a weight of their own, so that a change in one place is not hidden by the opposite one in another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_COLUMNS = 64  # as fast as a single sum on a CPU
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_MOVED = {*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}  # by every backend
_ODD = -7046029254386353131  # 2⁶⁴ divided by the golden ratio, as a signed integer


@torch.no_grad()
def column_sums(tensor: Tensor) -> list[Tensor]:
    """Sums of the tensor's bits, as int64 vectors. What does not fill a row of columns is not summed: gradients of a
    small bias may add up to zero."""
    plain = tensor.detach()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().view(-1)
    per_word = 8 // flat.element_size()
    words = flat.numel() // per_word if flat.storage_offset() % per_word == 0 else 0
    rows, used = words // _COLUMNS, words // _COLUMNS * _COLUMNS * per_word
    sums = [flat[:used].view(torch.int64).view(rows, _COLUMNS).sum(0)] if rows else []
    rest, width = flat[used:].view(_INTEGERS[flat.element_size()]), _COLUMNS * per_word
    full = len(rest) // width * width  # of a tensor that does not begin with a word
    if full:
        sums.append(rest[:full].view(-1, width).sum(0, dtype=torch.int64))
    if full < len(rest):
        sums.append(rest[full:].to(torch.int64))
    return sums


@torch.no_grad()
def mixed(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    """A 64-bit hash of sums in this order, as a tensor on `device`."""
    values = torch.cat([each.to(device) for each in sums])
    weights = torch.arange(1, len(values) + 1, device=device) * _ODD | 1
    return (values * weights).sum() * _ODD


def checksum(tensor: Tensor) -> int:
    """The checksum of one tensor. Reads it from the device."""
    sums = column_sums(tensor)
    return int(mixed(sums, tensor.device)) if sums else 0


def as_moved(tensor: Tensor) -> Tensor:
    """The tensor, or a view of its bytes if no backend moves its dtype (int16, uint16, float8)."""
    if tensor.dtype in _MOVED or tensor.dtype.is_complex or not tensor.is_contiguous():
        return tensor
    return tensor.view(-1).view(torch.uint8)
