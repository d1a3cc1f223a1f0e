"""Loaders for data that can only be iterated.

A stream of samples (an IterableDataset) is read whole by every rank, which keeps its own part by the same arithmetic
as everywhere: the run then means the same on any number of ranks, and a stream that knows nothing of ranks or workers
can't be counted twice. Resuming reads and drops what was used, so it is exact only where the stream repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.data.batches import digest, rows_of, samples_in
from paceline.data.loader import DataShard, MicroBatch, ReadOptions, micro_of, no_samples, own_or_stand_in
from paceline.data.sample_order import drawn, length_of
from paceline.data.slicing import BatchSlice, shares
from paceline.runtime.rng import RandomStream, derive_seed


class SampleStream:
    """An IterableDataset of samples: cut and collated in one worker process, which also keeps its randomness apart."""

    steps_per_epoch = None
    samples = None
    repeatable = False

    def __init__(
        self, dataset: Any, batch: int, part: DataShard, seed: int, reading: ReadOptions, *, drop_last: bool = False
    ) -> None:
        self._dataset, self._batch, self._part, self._seed = dataset, batch, part, seed
        self._reading, self._drop_last = reading, drop_last
        self._collate = reading.collate or default_collate

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        step = 0
        for epoch in range(epochs) if epochs is not None else count():
            before = step
            for micro in self._epoch(epoch, step, first_step):
                step = micro.step + micro.last
                if micro.step >= first_step:
                    yield micro
            if step == before:
                raise no_samples()

    def fingerprint(self) -> Any:
        return None

    def _epoch(self, epoch: int, step: int, first_step: int) -> DataLoader[MicroBatch]:
        return DataLoader(
            _EpochOfCuts(self._cuts, epoch, step, first_step),
            batch_size=None,
            num_workers=1,
            collate_fn=_unchanged,
            pin_memory=self._reading.pin_memory,
            # The worker's generators follow from this one, so that all ranks read one stream even where it shuffles.
            generator=torch.Generator().manual_seed(derive_seed(self._seed, epoch) >> 1),
            **dict(self._reading.options),
        )

    def _cuts(self, epoch: int, step: int, first_step: int) -> Iterator[MicroBatch]:
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(epoch)  # in the worker, which every epoch starts anew
        samples = iter(self._dataset)
        for chunk in iter(lambda: list(islice(samples, self._batch)), []):
            if self._drop_last and len(chunk) < self._batch:
                return
            for share in shares(len(chunk), self._batch, self._part.groups, self._part.rank, self._part.ranks):
                batch = self._collate(list(own_or_stand_in(chunk, share))) if step >= first_step else None
                yield micro_of(batch, share, len(chunk), epoch, step, ())
            step += 1


class _EpochOfCuts(IterableDataset[MicroBatch]):
    """One epoch, as the dataset that torch's loader runs in its worker."""

    def __init__(self, cuts: Callable[[int, int, int], Iterator[MicroBatch]], *where: int) -> None:
        self._cuts, self._where = cuts, where

    def __iter__(self) -> Iterator[MicroBatch]:
        return self._cuts(*self._where)


def _unchanged(item: Any) -> Any:
    return item


class ReadyBatches:
    """An iterable of ready global batches, whose size is known by looking at the first."""

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self._source = source
        self.in_memory = isinstance(source, (list, tuple))
        with RandomStream(seed):
            items = iter(source)
            try:
                first = next(items)
            except StopIteration:
                raise no_samples() from None
        self.fingerprint = digest(first)
        self.batch = samples_in(first)
        if items is source:  # a generator, which can be read once: the first batch is put back
            self._source = chain([first], items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source)

    def __len__(self) -> int:
        length = length_of(self._source)
        if length is None:
            raise TypeError("these batches have no length")
        return length


class BatchStream:
    """Ready global batches, of which each rank takes its rows."""

    def __init__(self, source: ReadyBatches, batch: int, part: DataShard, seed: int) -> None:
        self._source, self._batch, self._part, self._seed = source, batch, part, seed
        self._shares: dict[int, list[BatchSlice]] = {}

    samples = None

    @property
    def repeatable(self) -> bool:
        return self._source.in_memory

    @property
    def steps_per_epoch(self) -> int | None:
        return length_of(self._source)

    def fingerprint(self) -> Any:
        """Of a global batch, of which each rank takes its part."""
        return self._source.fingerprint

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        step = 0
        for epoch in range(epochs) if epochs is not None else count():
            before = step
            for batch in self._batches(epoch):
                if step >= first_step:
                    total = samples_in(batch)
                    for share in self._shares.get(total) or self._shares_of(total):
                        own = batch if share.samples == total else rows_of(batch, *share.rows)
                        yield micro_of(own, share, total, epoch, step, ())
                step += 1
            if step == before:
                raise no_samples()

    def _batches(self, epoch: int) -> Iterable[Any]:
        """Every rank draws the same batches, also where the source shuffles; a list draws nothing."""
        if self._source.in_memory:
            return self._source
        return (batch for [batch] in drawn(self._source, self._seed, epoch, 1))

    def _shares_of(self, total: int) -> list[BatchSlice]:
        """Nearly all batches have one length, so its cuts are worked out once."""
        part = self._part
        self._shares[total] = list(shares(total, self._batch, part.groups, part.rank, part.ranks))
        return self._shares[total]


class OwnBatches:
    """A DataLoader whose DistributedSampler already picked this rank's samples: its batches, as they come."""

    def __init__(self, loader: DataLoader[Any], sampler: Any, batch: int, part: DataShard) -> None:
        self._loader, self._sampler, self._batch, self._part = loader, sampler, batch, part

    samples = None
    repeatable = False

    @property
    def steps_per_epoch(self) -> int:
        return len(self._loader)

    def fingerprint(self) -> Any:
        return None

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        first_epoch, skip = divmod(first_step, self.steps_per_epoch)
        step = first_step
        for epoch in range(first_epoch, epochs) if epochs is not None else count(first_epoch):
            self._sampler.set_epoch(epoch)
            for batch in islice(self._loader, skip, None):
                yield from self._cut(batch, epoch, step)
                step += 1
            skip = 0

    def _cut(self, batch: Any, epoch: int, step: int) -> Iterator[MicroBatch]:
        """This rank's own groups. What the other ranks hold is taken to be as much, and added up where it matters."""
        own, ranks, rank = samples_in(batch), self._part.ranks, self._part.rank
        for share in shares(own, -(-self._batch // ranks), self._part.groups, 0, 1):
            micro = micro_of(rows_of(batch, share.start, share.stop), share, self._batch, epoch, step, ())
            yield replace(micro, start=rank * own + share.start, exact=False)
