"""Loaders for iterable data.

Every rank reads all samples of an IterableDataset and keeps its own slice. The result is independent of the number of
ranks, and a dataset that is unaware of ranks and workers is not read twice. Resuming reads and drops the samples
already used, so it is exact only if the dataset yields the same sequence again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.data.batches import Kind, comparable, digest, layout_of, rows_of, samples_in, tensors_in
from paceline.data.epoch_reader import (
    EpochLengths,
    EpochReader,
    Place,
    announce_epoch,
    length_of,
    lists_of,
    preserve_generators,
)
from paceline.data.loader import (
    DataShard,
    Loader,
    MicroBatch,
    ReadOptions,
    Slices,
    StartTimes,
    epochs_from,
    micro_of,
    no_samples,
    own_or_placeholder,
    unchanged,
)
from paceline.data.same_reading import watch_stream
from paceline.errors import DataError
from paceline.plan.slicing import slices_of
from paceline.plan.slow_input import InputSource
from paceline.runtime.generator_states import RandomStream
from paceline.runtime.rng import derive_seed

# Of ready batches, the first ones are compared between ranks, and then some of them.
_ALL, _SOME = 32, 8
T = TypeVar("T")


class SampleStream(Loader):
    """An IterableDataset, sliced and collated with its own RNG state: in this process, or in one worker."""

    def __init__(
        self,
        dataset: Any,
        batch: int,
        part: DataShard,
        seed: int,
        reading: ReadOptions,
        *,
        drop_last: bool = False,
        compare: bool = True,
    ) -> None:
        self._dataset, self._batch, self._seed = dataset, batch, seed
        self._reading, self._drop_last, self._compare = reading, drop_last, compare
        self._collate = reading.collate or default_collate
        self._starts = StartTimes()
        self.input = InputSource(
            "stream", min(1, reading.workers), started=self._starts.read if reading.workers else None
        )
        self._by_length = Slices(part, batch)
        self._reader = EpochReader(dataset, seed, random=RandomStream.of_worker)

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        step, watch = 0, watch_stream() if self._compare else None
        self._watched = watch is not None  # in the worker as well
        self._reader.begin(first_step)
        for epoch in epochs_from(0, epochs):
            before = step
            for micro in self._epoch(epoch, partial(self._slices, epoch, step, first_step)):
                step = micro.step + micro.last
                if watch is not None and micro.group == 0:
                    watch.add(micro.step, epoch, micro.content)
                if micro.step >= first_step:
                    yield micro
            if step == before:
                raise no_samples()

    def _epoch(self, epoch: int, read: Callable[[Iterator[Any]], Iterator[MicroBatch]]) -> Iterable[MicroBatch]:
        if self._reading.workers:
            reading = replace(self._reading, workers=1)
            return self._starts.first(read_in_workers(self._dataset, epoch, read, self._seed, reading))
        micros = self._reader.epoch(epoch, read)
        return map(MicroBatch.pin_memory, micros) if self._reading.pins else micros

    def _slices(self, epoch: int, step: int, first_step: int, samples: Iterator[Any]) -> Iterator[MicroBatch]:
        for chunk in lists_of(self._batch)(samples):
            total = len(chunk)
            if self._drop_last and total < self._batch:
                return
            content = hash(tuple(comparable(sample) for sample in chunk)) if self._watched else 0
            whole = self._whole(chunk) if step >= first_step else None
            for share in self._by_length[total]:
                batch = None
                if whole is not None:
                    batch = rows_of(whole, *share.rows)
                elif step >= first_step:
                    batch = self._collate(list(own_or_placeholder(chunk, share)))
                yield micro_of(batch, share, total, epoch, step, (), content)
            step += 1

    def _whole(self, chunk: list[Any]) -> Any:
        """The batch, of which ranks take their rows: a collate function of the user may draw random numbers, or mix
        samples. None if its rows are not its samples: then slices are collated."""
        if self._collate is default_collate:
            return None
        batch = self._collate(chunk)
        known = layout_of(batch)
        return batch if known is not None and known[0] == len(chunk) else None


class ReadyBatches:
    """An iterable of global batches. Unless a DataLoader declares it, the first one determines the batch size."""

    batch: int
    kind: Kind | None = None
    fingerprint: int | None = None

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self.source, self._seed = source, seed
        self.in_memory = isinstance(source, (list, tuple))
        if isinstance(source, DataLoader) and (declared := declared_batch(source)):
            self.batch = declared
            return
        with RandomStream(seed), preserve_generators(source):
            items = iter(source)
            try:
                first = next(items)
            except StopIteration:
                raise no_samples() from None
        self.fingerprint = digest(first)
        if _is_sample(first):
            raise DataError(
                "not-batches",
                f"The {type(source).__name__} yields samples, not batches: the target of its first item is one number.",
            )
        self.batch, known = samples_in(first), layout_of(first)
        self.kind = None if known is None else known[1]
        if items is source:  # a generator can be consumed only once: put the first batch back
            self.source = chain([first], items)

    def beginnings(self) -> Iterator[Any]:
        """The first batch in two passes, if each has workers of its own."""
        loader = loader_in(self.source)
        if self.fingerprint is not None and loader is not None and loader.num_workers and not loader.persistent_workers:
            yield self.fingerprint
            with RandomStream(self._seed), preserve_generators(self.source):
                yield digest(next(iter(self.source)))


def loader_in(source: Any) -> DataLoader[Any] | None:
    """A DataLoader, also one that begins a pipeline, as `webdataset.WebLoader` does."""
    stages = getattr(source, "pipeline", None)
    first = stages[0] if isinstance(stages, (list, tuple)) and stages else source
    return first if isinstance(first, DataLoader) else None


def beginnings(dataset: Any, seed: int, reading: ReadOptions) -> Iterator[Any]:
    """The first samples in two passes, each in a new worker, if they are used: the dataset here stays as it is."""
    alone = replace(reading, workers=1)
    passes = (read_in_workers(dataset, 0, _first_samples, seed, alone) for _ in range(2 if reading.workers else 0))
    return (next(iter(samples)) for samples in passes)


def _first_samples(samples: Iterator[Any]) -> Iterator[Any]:
    yield tuple(comparable(sample) for sample in islice(samples, _SOME))


def declared_batch(loader: DataLoader[Any]) -> int | None:
    return loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)


def _is_sample(item: Any) -> bool:
    """An (input, target) pair of which only the input has dims. A target of a batch has at least one."""
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], torch.Tensor) and item[0].dim()):
        return False
    target = item[1]
    return isinstance(target, int) or (isinstance(target, torch.Tensor) and target.dim() == 0)


def source_of_batches(source: Any, starts: StartTimes) -> InputSource:
    """A DataLoader of the user, which reads by itself, or an iterable."""
    if not isinstance(source, DataLoader):
        return InputSource("batches")
    anew = source.num_workers and not source.persistent_workers
    return InputSource("loader", source.num_workers, started=starts.read if anew else None)


class BatchStream(Loader):
    """Global batches, of which each rank takes its rows."""

    def __init__(self, source: ReadyBatches, batch: int, part: DataShard, seed: int, *, compare: bool = True) -> None:
        self._source, self._compare, self.repeatable = source, compare, source.in_memory
        self._reader = EpochReader(source.source, seed)
        self.lengths = EpochLengths(source.source, lambda: length_of(source.source))
        self._by_length = Slices(part, batch)
        self._starts = StartTimes()
        self.input = source_of_batches(source.source, self._starts)

    def fingerprint(self) -> Any:
        """Of the first global batch, unless ranks may have different ones."""
        return self._source.fingerprint if self._compare else None

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        step, kind, watch = 0, self._source.kind, watch_stream() if self._compare else None
        self._reader.begin(first_step)
        for epoch in epochs_from(0, epochs):
            before = step
            for batch in self._batches(epoch):
                if watch is not None and (step < _ALL or step % _SOME == 0):
                    watch.add(step, epoch, comparable(batch))
                if step >= first_step:
                    total = samples_in(batch, kind)
                    for share in self._by_length[total]:
                        own = batch if share.samples == total else rows_of(batch, *share.rows, kind)
                        yield micro_of(own, share, total, epoch, step, ())
                step += 1
            if step == before:
                raise no_samples()
            if epochs != 1:
                self.lengths.check(type(self._source.source).__name__, epoch, step - before)

    def _batches(self, epoch: int) -> Iterable[Any]:
        """The same batches on every rank, even if the source shuffles; a list needs no seeding."""
        if self._source.in_memory:
            return self._source.source
        return self._starts.first(self._reader.epoch(epoch))


class UserBatches(Loader):
    """A DataLoader whose DistributedSampler selects the samples of this rank: its batches, unchanged."""

    def __init__(
        self, loader: DataLoader[Any], sampler: Any, batch: int, part: DataShard, *, announce: bool = False
    ) -> None:
        self._loader, self._sampler, self._batch, self._part = loader, sampler, batch, part
        self._announce = announce  # epochs to its dataset
        self.lengths = EpochLengths(sampler, lambda: len(loader))
        self._starts = StartTimes()
        self.input = source_of_batches(loader, self._starts)

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        first_epoch, skip = self.lengths.locate(first_step) or Place(0, 0)
        step = first_step
        for epoch in epochs_from(first_epoch, epochs):
            announce_epoch(self._loader.dataset if self._announce else None, epoch)
            self._sampler.set_epoch(epoch)
            for number, batch in enumerate(islice(self._starts.first(self._loader), skip, None), skip):
                yield from self._cut(batch, self._samples(batch, number), epoch, step)
                step += 1
            skip = 0

    def _samples(self, batch: Any, number: int) -> int:
        """The samples in a batch. A collate function may drop some, or use another dim as batch dim."""
        size = getattr(self._loader.batch_sampler, "batch_size", self._batch)
        expected = min(size, len(self._sampler) - number * size)
        tensors = [tensor for tensor in tensors_in(batch) if tensor.dim()]
        known = layout_of(batch)
        time_first = all(tensor.dim() > 1 and tensor.shape[1] == expected for tensor in tensors)
        return expected if known is None or time_first else known[0]

    def _cut(self, batch: Any, own: int, epoch: int, step: int) -> Iterator[MicroBatch]:
        """The groups of this rank. Other ranks are assumed to have as many samples; `exact=False` marks that."""
        ranks, rank = self._part.ranks, self._part.rank
        for share in slices_of(own, -(-self._batch // ranks), self._part.groups, 0, 1):
            rows = batch if share.samples == own else rows_of(batch, share.start, share.stop, samples=own)
            micro = micro_of(rows, share, self._batch, epoch, step, ())
            yield replace(micro, start=rank * own + share.start, exact=False)


def read_in_workers(
    dataset: Any, epoch: int, read: Callable[[Iterator[Any]], Iterator[T]], seed: int, reading: ReadOptions
) -> DataLoader[T]:
    """What `read` makes of the samples of an epoch. The results of several workers alternate."""
    return DataLoader(
        _Epoch(dataset, epoch, read),
        batch_size=None,
        num_workers=reading.workers,
        collate_fn=unchanged,
        pin_memory=reading.pin_memory,
        # The same on every rank: a stream that shuffles has to shuffle equally, also before it is split.
        generator=torch.Generator().manual_seed(derive_seed(seed, epoch) >> 1),
        **reading.for_dataset(dataset),
    )


class _Epoch(IterableDataset[T]):
    def __init__(self, dataset: Any, epoch: int, read: Callable[[Iterator[Any]], Iterator[T]]) -> None:
        self._dataset, self._epoch, self._read = dataset, epoch, read

    def __iter__(self) -> Iterator[T]:
        announce_epoch(self._dataset, self._epoch)
        return self._read(iter(self._dataset))
