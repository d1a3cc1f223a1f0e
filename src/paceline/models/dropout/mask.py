"""Dropout masks as a function of sample keys and coordinates.

The mask of an element is a hash of the key of its sample, the number of the call and its coordinates in the sample. Its
flat index would change with the padding of a batch. Key, call and the coordinates before the last one give a row its
start and an odd stride, 63 bits in total; two multiply-xorshift rounds (the constants are those of Wellons' lowbias32)
hash start + (column + 1) * stride. With the same stride in every row, columns 12 apart have a correlation of 5e-4. All
arithmetic is modulo 2**32 in int32, so that a CPU, a GPU and compiled code give the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.runtime.sample_keys import SampleKeys

# Odd constants, one pair per coordinate, so that rows with the same start have different strides.
_FIRST = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
_SECOND = (0xA2C2A6D5, 0xD6E8FEB9, 0xB5297A4D, 0x68E31DA5, 0x1B56C4E9)
CALL = (0x632BE5AB, 0x51ED270B)
_ROUNDS = (0x7FEB352D, 0x846CA68B)
DIMS = len(_FIRST)  # largest number of coordinates before the last one


def to_int32(number: int) -> int:
    """The int32 with the same bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


class Reading(NamedTuple):
    """How the shape of an activation is read."""

    shape: tuple[int, ...]  # (samples, *coordinates), which splits (samples × heads, …)
    time_major: bool  # whether the activation is (tokens, samples, width)


def read_shape(
    shape: Sequence[int], samples: int, *, splits: bool = True, time_major: bool = False, known: bool | None = None
) -> Reading | None:
    """None if it is not certain where the samples are.

    `splits`: whether a multiple of the samples may be split: their stacked views have another order. `time_major`:
    whether (tokens, samples, width) occurs. `known`: which reading to choose if there are two.
    """
    if not shape:
        return None
    if time_major and known is not False and len(shape) == 3 and shape[1] == samples:
        is_certain = known or (shape[0] != samples and (shape[2] != samples or shape[0] % samples))
        return Reading((samples, shape[0], shape[2]), True) if is_certain else None
    two = known is None and len(shape) > 2 and shape[1] == samples
    if shape[0] != samples and (not splits or shape[0] % samples or two):
        return None
    first = () if shape[0] == samples and len(shape) > 1 else (shape[0] // samples,)
    inner = (*first, *shape[1:])
    return Reading((samples, *inner), False) if len(inner) <= DIMS + 1 else None


def reading_of(keys: SampleKeys, shape: Sequence[int]) -> Reading | None:
    """Of a call of dropout. If a shape has two readings, such as 6 tokens of 6 samples, the one that the same call had
    with another shape is chosen."""
    reading = read_shape(shape, keys.samples, splits=keys.splits, time_major=keys.time_major)
    if len(shape) > 2 and not torch.compiler.is_compiling():
        calls, call = keys.time_major_calls, (keys.current.name, keys.calls)
        if reading is not None:
            calls[call] = reading.time_major
        elif call in calls:
            known = calls[call]
            return read_shape(shape, keys.samples, splits=keys.splits, time_major=keys.time_major, known=known)
    return reading


def arrange(mask: Tensor, reading: Reading, shape: Sequence[int]) -> Tensor:
    """A mask of the shape of a reading, in the shape that this was derived from."""
    return mask.transpose(0, 1) if reading.time_major else mask.view(shape)


def hash_elements(keys: Tensor, call: int, shape: Sequence[int], offsets: Sequence[int] = ()) -> Tensor:
    """Uniform int32 numbers of `shape`, (samples, *coordinates). `offsets`: of the first element, by coordinate."""
    rows = tuple(shape[1:-1])
    offsets = (*offsets, *[0] * (len(shape) - 1 - len(offsets)))
    first, second = row_terms(rows, tuple(offsets[:-1]), keys.device)
    lead = (keys.shape[0],) + (1,) * (len(shape) - 1)
    low, high = keys[:, 0].view(lead), keys[:, 1].view(lead)
    start = _round(low + (first + to_int32(call * CALL[0])), 16, _ROUNDS[0])
    start = start ^ ((start >> 15) & 0x1FFFF)
    stride = ((high + (second + to_int32(call * CALL[1]))) ^ start) | 1
    columns = torch.arange(offsets[-1] + 1, offsets[-1] + shape[-1] + 1, dtype=torch.int32, device=keys.device)
    state = columns * stride
    state = state + start if torch.compiler.is_compiling() else state.add_(start)
    return _round(_round(state, 16, _ROUNDS[0]), 15, _ROUNDS[1])


def _round(state: Tensor, shift: int, factor: int) -> Tensor:
    """`>>` is arithmetic on int32: clear the bits that it copies from the sign."""
    if torch.compiler.is_compiling():
        return (state ^ ((state >> shift) & ((1 << (32 - shift)) - 1))) * to_int32(factor)
    shifted = (state >> shift).bitwise_and_((1 << (32 - shift)) - 1)
    return shifted.bitwise_xor_(state).mul_(to_int32(factor))


def _terms(rows: tuple[int, ...], offsets: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """What the coordinates before the last one add to both halves of the state: two tensors of shape (*rows, 1)."""
    halves = []
    for factors in (_FIRST, _SECOND):
        total = torch.zeros((1,) * (len(rows) + 1), dtype=torch.int32, device=device)
        for dim, (size, start) in enumerate(zip(rows, offsets, strict=True)):
            places = torch.arange(start, start + size, dtype=torch.int32, device=device)
            total = total + (places * to_int32(factors[dim])).view((size,) + (1,) * (len(rows) - dim))
        halves.append(total)
    return halves[0], halves[1]


_cached_terms = lru_cache(maxsize=256)(_terms)


def row_terms(rows: tuple[int, ...], offsets: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return _terms(rows, offsets, device)
    return _cached_terms(rows, offsets, device)


def threshold(p: float) -> int:
    """Elements whose hash is at least this are kept."""
    return min(round(p * (1 << 32)) - (1 << 31), (1 << 31) - 1)
