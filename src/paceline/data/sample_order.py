"""Sample orders: which samples make up the steps of an epoch, from a given step on.

An order yields the indices of global batches and is identical on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

from paceline.data.permutation import Permutation
from paceline.runtime.rng import RandomStream, derive_seed

# Positions computed at once, to amortize the overhead of numpy over small batches.
_BLOCK = 4096


class SampleOrder(Protocol):
    batch: int

    @property
    def steps_per_epoch(self) -> int | None: ...

    def epoch(self, epoch: int, first_step: int) -> Iterator[Sequence[Any]]:
        """The sample indices of each step of an epoch, starting at its step `first_step`."""
        ...


class FormulaOrder:
    """A keyed permutation, or the natural order. Resuming at any step costs nothing."""

    def __init__(self, n: int, batch: int, seed: int, *, shuffle: bool, drop_last: bool = False) -> None:
        self.n, self.batch, self._seed, self._shuffle = n, batch, seed, shuffle
        self._usable = n - n % batch if drop_last else n

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._usable // self.batch)

    def epoch(self, epoch: int, first_step: int) -> Iterator[Sequence[int]]:
        shuffled = Permutation(self.n, self._seed, epoch) if self._shuffle else None
        block = max(1, _BLOCK // self.batch) * self.batch
        for start in range(first_step * self.batch, self._usable, block):
            positions = np.arange(start, min(start + block, self._usable), dtype=np.int64)
            samples = (shuffled(positions) if shuffled else positions).tolist()
            for begin in range(0, len(samples), self.batch):
                yield samples[begin : begin + self.batch]


class SamplerOrder:
    """The indices of a custom sampler.

    It runs on every rank under the same seed, so all ranks see the same indices. Resuming drops those already used.
    """

    def __init__(self, sampler: Iterable[Any], batch: int, seed: int, *, drop_last: bool = False) -> None:
        self.batch, self._sampler, self._seed, self._drop_last = batch, sampler, seed, drop_last
        self._past = Past(sampler, seed)

    @property
    def steps_per_epoch(self) -> int | None:
        length = length_of(self._sampler)
        if length is None:
            return None
        return length // self.batch if self._drop_last else -(-length // self.batch)

    def epoch(self, epoch: int, first_step: int) -> Iterator[Sequence[Any]]:
        self._past.replay(epoch)
        for step, chunk in enumerate(drawn(self._sampler, self._seed, epoch, self.batch)):
            if step >= first_step and not (self._drop_last and len(chunk) < self.batch):
                yield chunk


class BatchSamplerOrder:
    """A custom batch sampler: each of its lists is a global batch."""

    def __init__(self, batches: Iterable[Sequence[Any]], batch: int, seed: int) -> None:
        self.batch, self._batches, self._seed = batch, batches, seed
        self._past = Past(batches, seed)

    @property
    def steps_per_epoch(self) -> int | None:
        return length_of(self._batches)

    def epoch(self, epoch: int, first_step: int) -> Iterator[Sequence[Any]]:
        self._past.replay(epoch)
        for [batch] in islice(drawn(self._batches, self._seed, epoch, 1), first_step, None):
            yield batch.tolist() if hasattr(batch, "tolist") else list(batch)


class Past:
    """Replays completed epochs for samplers that keep state, such as an epoch count, when a run is resumed.

    Torch's own samplers are stateless, and `set_epoch` needs no replay."""

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self._source, self._seed, self._done = source, seed, 0
        ours = type(source).__module__.startswith("torch.utils.data")
        self._remembers = not ours and not hasattr(source, "set_epoch") and length_of(source) is not None

    def replay(self, epoch: int) -> None:
        if self._remembers:
            for past in range(self._done, epoch):
                for _ in drawn(self._source, self._seed, past, _BLOCK):
                    pass
        self._done = max(self._done, epoch + 1)


def drawn(source: Iterable[Any], seed: int, epoch: int, at_once: int) -> Iterator[list[Any]]:
    """Iterate over one epoch of `source`, `at_once` items at a time, identically on every rank.

    The source runs under an RNG state of its own, seeded by (seed, epoch) and swapped in while it is read. A swap takes
    0.2 ms. The source is read lazily and may be infinite.
    """
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    stream = RandomStream(derive_seed(seed, epoch) >> 1)
    for owner in (source, getattr(source, "sampler", None)):
        for generator in getattr(owner, "__dict__", {}).values():
            if isinstance(generator, torch.Generator):
                generator.manual_seed(derive_seed(seed, epoch) >> 1)
    with stream:
        items = iter(source)
    while True:
        with stream:
            some = list(islice(items, at_once))
        if not some:
            return
        yield some


def length_of(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None
