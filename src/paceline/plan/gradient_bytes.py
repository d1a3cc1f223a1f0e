"""How many bytes of gradients a step exchanges, by method of `sync:`, from the shapes of the parameters.

PowerSGD approximates a matrix of n × m values by two factors of n × r and m × r, where that is at least `min_ratio`
times smaller. A tensor of more dimensions is a matrix of its first dimension and the others; vectors stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

VALUE_BYTES = 4  # of a gradient in fp32
CAST_BYTES = 2  # fp16 and bf16
INT8_BLOCK = 256  # values that share a scale
INT8_BYTES = 1 + VALUE_BYTES / INT8_BLOCK

Shape = Sequence[int]


class FactorBytes(NamedTuple):
    """What PowerSGD all-reduces: the first factors with everything that stays uncompressed, then the second factors."""

    first: int
    second: int
    uncompressed: int

    @property
    def total(self) -> int:
        return self.first + self.second + self.uncompressed


def dense_bytes(shapes: Iterable[Shape]) -> int:
    return VALUE_BYTES * sum(prod(shape) for shape in shapes)


def powersgd_bytes(shapes: Iterable[Shape], rank: int, min_ratio: float) -> FactorBytes:
    first = second = uncompressed = 0
    for shape in shapes:
        if is_compressed(shape, rank, min_ratio):
            rows, columns = as_matrix(shape)
            first += rows * rank
            second += columns * rank
        else:
            uncompressed += prod(shape)
    return FactorBytes(VALUE_BYTES * first, VALUE_BYTES * second, VALUE_BYTES * uncompressed)


def is_compressed(shape: Shape, rank: int, min_ratio: float) -> bool:
    """Whether PowerSGD compresses a gradient of this shape."""
    if len(shape) < 2:
        return False
    rows, columns = as_matrix(shape)
    return (rows + columns) * rank * min_ratio <= rows * columns


def as_matrix(shape: Shape) -> tuple[int, int]:
    return shape[0], prod(shape[1:])
