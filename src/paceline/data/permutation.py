"""Shuffles without storing indices.

Sample i of epoch e is a keyed permutation of (seed, e, i). No list of indices is built, so a dataset of 10⁹ samples
costs nothing to shuffle, and any position of any epoch can be computed on any rank without communication.

The permutation is a Feistel network over a grid of rows × columns ≥ n cells, both near √n. Each round shifts one
coordinate by a hash of the other, which is invertible, so every round is a permutation of the grid. Cells beyond n are
permuted again until they fall inside; the grid is at most one row larger than n, so this is rare.
"""

from __future__ import annotations

from math import ceil, isqrt

import numpy as np
from numpy.typing import NDArray

from paceline.runtime.rng import derive_seed

Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]

# Four rounds pass the uniformity tests; eight leave a margin and cost 0.08 µs a sample (benchmarks/data_order.py).
_ROUNDS = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


class Permutation:
    """A permutation of range(n), keyed by (seed, epoch) and evaluated lazily."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._n = np.uint64(n)
        rows = isqrt(n - 1) + 1 if n > 1 else 1
        self._rows, self._columns = np.uint64(rows), np.uint64(ceil(n / rows))
        self._keys = [np.uint64(derive_seed(seed, epoch, n, turn)) for turn in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        """The samples at these positions (integers below n)."""
        cells = self._shuffle(positions.astype(np.uint64))
        while (outside := cells >= self._n).any():
            cells[outside] = self._shuffle(cells[outside])
        return cells.astype(np.int64)

    def _shuffle(self, cells: _Words) -> _Words:
        row = cells // self._columns
        column = cells - row * self._columns
        for turn, key in enumerate(self._keys):
            if turn % 2 == 0:
                row = _shift(row, column, key, self._rows)
            else:
                column = _shift(column, row, key, self._columns)
        shuffled: _Words = row * self._columns + column
        return shuffled


def _shift(coordinate: _Words, by: _Words, key: np.uint64, size: np.uint64) -> _Words:
    """(coordinate + hash of `by`) modulo size. Multiplying 32 hashed bits by size is a modulo without a division."""
    hashed = (by + key) * _ODD
    hashed ^= hashed >> _HALF
    hashed *= _ODD
    hashed >>= _HALF
    hashed *= size
    hashed >>= _HALF
    shifted: _Words = coordinate + hashed
    shifted -= size * (shifted >= size)
    return shifted
