"""Dropout masks on a GPU, without compile: one Triton kernel.

It computes the hash of `mask.py`, which says why. Import this module only where Triton is installed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.models.dropout.mask import CALL, arrange, reading_of, row_terms, threshold, to_int32
from paceline.runtime.sample_keys import SampleKeys

_ELEMENTS = 4096  # of a tile
_COLUMNS = 1024  # of a tile, at most


@triton.jit(do_not_specialize=["low_call", "high_call", "limit", "first_column"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    outputs,
    keys,
    first,
    second,
    scale,
    low_call,
    high_call,
    limit,
    rows,
    columns,
    rows_of_sample,
    first_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = row < rows
    sample, place = row // rows_of_sample, row % rows_of_sample
    low = tl.load(keys + 2 * sample, exists, 0) + tl.load(first + place, exists, 0) + low_call
    high = tl.load(keys + 2 * sample + 1, exists, 0) + tl.load(second + place, exists, 0) + high_call
    # Unsigned, as shifts must not copy the sign.
    start = low.to(tl.uint32, bitcast=True)
    start = (start ^ (start >> 16)) * tl.full([1], 0x7FEB352D, tl.uint32)
    start = start ^ (start >> 15)
    stride = (high.to(tl.uint32, bitcast=True) ^ start) | 1
    state = (column + first_column + 1).to(tl.uint32)[None, :] * stride[:, None] + start[:, None]
    state = (state ^ (state >> 16)) * tl.full([1, 1], 0x7FEB352D, tl.uint32)
    state = (state ^ (state >> 15)) * tl.full([1, 1], 0x846CA68B, tl.uint32)
    keep = state.to(tl.int32, bitcast=True) >= limit
    where = row[:, None] * columns + column[None, :]
    inside = exists[:, None] & (column < columns)[None, :]
    tl.store(outputs + where, tl.where(keep, tl.load(scale), 0.0), inside)


@lru_cache(maxsize=256)
def _plan(
    shape: tuple[int, ...], offsets: tuple[int, ...], p: float, device: torch.device, dtype: torch.dtype
) -> tuple[Any, ...]:
    """What does not change between calls: the arguments before and after the call number, and the grid."""
    offsets = (*offsets, *[0] * (len(shape) - 1 - len(offsets)))
    first, second = row_terms(shape[1:-1], offsets[:-1], device)
    columns, count = shape[-1], first.numel()
    rows = shape[0] * count
    wide = min(triton.next_power_of_2(columns), _COLUMNS)
    high = max(_ELEMENTS // wide, 1)
    grid = (triton.cdiv(rows, high), triton.cdiv(columns, wide))
    scale = torch.full((), 1.0 / (1.0 - p), dtype=dtype, device=device)  # a number would be rounded to float32
    return (first, second, scale), (threshold(p), rows, columns, count, offsets[-1], high, wide), grid


def scaled_mask(keys: SampleKeys, like: Tensor, shape: tuple[int, ...], p: float) -> Tensor | None:
    """1 / (1 - p) for elements to keep and 0 for the others, with the dtype and device of `like`; None if it cannot be
    computed by sample."""
    rows, reading = keys.rows, reading_of(keys, shape)
    if rows is None or reading is None or 0 in reading.shape:
        return None
    batched = reading.shape
    call, (low, high) = keys.calls, keys.current.words
    keys.used, keys.calls = True, call + 1
    mask = torch.empty(batched, dtype=like.dtype, device=like.device)
    tensors, numbers, grid = _plan(batched, keys.offsets_of(batched), p, like.device, like.dtype)
    words = to_int32(call * CALL[0] + low), to_int32(call * CALL[1] + high)
    with torch.cuda.device_of(mask):  # Triton launches on the current device
        _kernel[grid](mask, rows.to(like.device), *tensors, *words, *numbers)
    return arrange(mask, reading, shape)
