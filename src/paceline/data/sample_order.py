"""Sample orders: which samples make up the steps of an epoch, from a given step on.

An order yields the indices of global batches and is identical on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import ceil, isqrt
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from paceline.data.epoch_reader import EpochLengths, EpochReader, length_of, lists_of
from paceline.runtime.rng import derive_seed

# Positions computed at once, to amortize the overhead of numpy over small batches.
_BLOCK = 4096
Indices = NDArray[np.int64]
_Words = NDArray[np.uint64]
# Four rounds pass the uniformity tests; eight leave a margin and cost 0.08 µs a sample (benchmarks/data_order.py).
_ROUNDS = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


class SampleOrder(Protocol):
    batch: int
    lengths: EpochLengths

    def begin(self, step: int) -> None:
        """Called before the first epoch is read, with the step that the run has reached."""

    def epoch(self, epoch: int, first_step: int) -> Iterator[Sequence[Any]]:
        """The sample indices of each step of an epoch, starting at its step `first_step`."""


class FormulaOrder:
    """A keyed permutation, or the natural order. Resuming at any step costs nothing."""

    def __init__(self, n: int, batch: int, seed: int, *, shuffle: bool, drop_last: bool = False) -> None:
        self.n, self.batch, self._seed, self._shuffle = n, batch, seed, shuffle
        self._usable = n - n % batch if drop_last else n
        self.lengths = EpochLengths(None, lambda: -(-self._usable // self.batch))

    def begin(self, step: int) -> None:
        pass

    def epoch(self, epoch: int, first_step: int) -> Iterator[Sequence[int]]:
        shuffled = Permutation(self.n, self._seed, epoch) if self._shuffle else None
        block = max(1, _BLOCK // self.batch) * self.batch
        for start in range(first_step * self.batch, self._usable, block):
            positions = np.arange(start, min(start + block, self._usable), dtype=np.int64)
            samples = (shuffled(positions) if shuffled else positions).tolist()
            for begin in range(0, len(samples), self.batch):
                yield samples[begin : begin + self.batch]


class SamplerOrder:
    """The indices of a custom sampler, identical on every rank. Resuming drops those already used."""

    def __init__(
        self, sampler: Iterable[Any], batch: int, seed: int, loader: DataLoader[Any], *, drop_last: bool = False
    ) -> None:
        self.batch, self._sampler, self._drop_last = batch, sampler, drop_last
        self._reader = EpochReader(sampler, seed, loader)
        self.begin = self._reader.begin
        self.lengths = EpochLengths(sampler, self._steps)

    def _steps(self) -> int | None:
        length = length_of(self._sampler)
        if length is None:
            return None
        return length // self.batch if self._drop_last else -(-length // self.batch)

    def epoch(self, epoch: int, first_step: int) -> Iterator[Sequence[Any]]:
        for step, chunk in enumerate(self._reader.epoch(epoch, lists_of(self.batch))):
            if step >= first_step and not (self._drop_last and len(chunk) < self.batch):
                yield chunk


class BatchSamplerOrder:
    """A custom batch sampler: each of its lists is a global batch."""

    def __init__(self, loader: DataLoader[Any], batch: int, seed: int) -> None:
        assert loader.batch_sampler is not None
        self.batch = batch
        self._reader = EpochReader(loader.batch_sampler, seed, loader, seed_first=False)
        self.begin = self._reader.begin
        self.lengths = EpochLengths(loader.batch_sampler, lambda: length_of(loader.batch_sampler))

    def epoch(self, epoch: int, first_step: int) -> Iterator[Sequence[Any]]:
        for batch in islice(self._reader.epoch(epoch), first_step, None):
            yield batch.tolist() if hasattr(batch, "tolist") else list(batch)


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
