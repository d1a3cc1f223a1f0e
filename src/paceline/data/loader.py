"""Loaders yield the micro-batches of this rank, in an order independent of the number of ranks and workers.

`IndexedLoader` uses `torch.utils.data.DataLoader` for workers and pinned memory and feeds it a single stream of index
lists. Its state is one integer: the number of completed steps. Workers read an epoch after another as those of torch
do: they are started anew, or persist. Those of the Trainer persist until an attribute of the dataset changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from multiprocessing.sharedctypes import RawArray
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from paceline.data.batches import apply, floors
from paceline.data.epoch_reader import UNKNOWN, EpochLengths, Place, plain_attributes
from paceline.data.input_hints import Collate, explain_pickling
from paceline.data.same_reading import content_of, require_same_samples, try_collate, watch_order
from paceline.data.sample_order import FormulaOrder, SampleOrder
from paceline.data.seeded_dataset import Part, SeededBatches, place_of_reading, reads_batches
from paceline.errors import DataError
from paceline.plan.slicing import BatchSlice, fixed_slices, slices_of
from paceline.plan.slow_input import InputSource, Kind
from paceline.runtime import collectives

T = TypeVar("T")


@dataclass(slots=True)
class MicroBatch:
    """What one rank runs through the model at once, and its position in the run."""

    batch: Any
    samples: int  # of this rank; 0 if it participates with a placeholder of weight zero
    start: int  # offset of these samples in the step
    step_samples: int  # in the step, over all ranks
    group: int
    last: bool  # whether this is the last group of the step
    epoch: int
    step: int  # since the start of the run
    indices: Sequence[Any] = ()  # of the samples, if the dataset has indices
    content: int = 0  # checksum of the whole step, if every rank reads it
    exact: bool = True  # whether every rank knows step_samples without communication
    floors: dict[int, float] | None = None  # taken before the batch left the CPU

    def with_floors(self) -> MicroBatch:
        if self.floors is None and (self.step < 100 or not self.step * 0x9E3779B1 >> 24 & 7):  # later, one in eight
            self.floors = floors(self.batch)
        return self

    def pin_memory(self) -> MicroBatch:
        """Called by torch's pin-memory thread on custom batch types."""
        return replace(self, batch=apply(self.batch, torch.Tensor.pin_memory))


@dataclass(frozen=True)
class DataShard:
    """The data rank of this process, and the number of accumulation groups per step."""

    rank: int = 0
    ranks: int = 1
    groups: int = 1
    fixed: bool = False  # whether a batch has the same slices on any number of ranks

    def slices(self, samples: int, batch: int) -> Iterator[BatchSlice]:
        """The slices of this rank in a step of `samples` samples."""
        if self.fixed:
            return fixed_slices(samples, self.groups * self.ranks, self.rank, self.ranks)
        return slices_of(samples, batch, self.groups, self.rank, self.ranks)


class Slices(dict[int, list[BatchSlice]]):
    """The slices of this rank by the number of samples in a step, which is nearly always the same."""

    def __init__(self, part: DataShard, batch: int) -> None:
        self._part, self._batch = part, batch

    def __missing__(self, samples: int) -> list[BatchSlice]:
        self[samples] = list(self._part.slices(samples, self._batch))
        return self[samples]


class Loader:
    """Yields micro-batches from a given step on, epoch after epoch."""

    input: InputSource
    lengths: EpochLengths = UNKNOWN
    repeatable = False  # whether reading a step again yields the same samples

    @property
    def samples(self) -> int | None:
        """Samples per epoch, if known."""
        return None

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        raise NotImplementedError

    def fingerprint(self) -> Any:
        """A value that is equal on every rank if the data is; None if unknown."""
        return None


def epochs_from(first: int, epochs: int | None) -> Iterable[int]:
    """The epochs to read; without end if their number is None."""
    return count(first) if epochs is None else range(first, epochs)


@dataclass(frozen=True)
class ReadOptions:
    """How samples are read and collated."""

    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    pin_memory: bool = False
    compare: bool = False  # samples between ranks, before the first step
    announce: bool = False  # epochs, to `set_epoch` of a dataset
    persistent: bool = True  # workers
    whole: bool = False  # whether a rank reads and collates whole batches, and keeps its slice
    options: tuple[tuple[str, Any], ...] = ()  # further DataLoader arguments, from the user's loader

    @property
    def pins(self) -> bool:
        """Whether there is a device to pin memory for."""
        return self.pin_memory and torch.accelerator.is_available()

    def for_dataset(self, dataset: Any) -> dict[str, Any]:
        """The further arguments of a DataLoader around what reads this dataset."""
        given = dict(self.options)
        return {**given, "worker_init_fn": partial(_start_worker, dataset, given.get("worker_init_fn"))}


class IndexedLoader(Loader):
    """A loader for map-style datasets."""

    def __init__(self, dataset: Any, order: SampleOrder, part: DataShard, seed: int, reading: ReadOptions) -> None:
        default = Collate(f"{type(dataset).__name__}{place_of_reading(dataset)}")
        own = None if reading.collate is default_collate else reading.collate
        self._batches = SeededBatches(
            dataset, seed, own or default, own_collate=own is not None, announce=reading.announce
        )
        self._order, self._slices, self._reading = order, Slices(part, order.batch), reading
        self.lengths, self.repeatable = order.lengths, isinstance(order, FormulaOrder)
        self._dataset, self._seed, self._part, self._collate = dataset, seed, part, own
        self._timed = TimedReading(self._batches, reading.workers) if reading.workers else None
        read = None if self._timed is None else self._timed.read
        self._starts = StartTimes()
        kind: Kind = "loader" if reading.options else "dataset"
        self.input = InputSource(kind, reading.workers, read, None if reading.persistent else self._starts.read)
        self._first: Sequence[Any] = ()  # indices of the first step
        self._watched = False

    @property
    def samples(self) -> int | None:
        return self._batches.count

    def fingerprint(self) -> Any:
        return self._batches.fingerprint()

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        reading, loader, known = self._reading, None, None
        watch = None if isinstance(self._order, FormulaOrder) else watch_order()
        self._watched = watch is not None
        # Whether samples that a rank or worker reads at once may be other ones elsewhere.
        several = collectives.world() > 1 or reading.workers > 0
        compare = reading.compare and (several or (self._part.groups > 1 and reads_batches(self._dataset)))
        sliced = self._part.ranks * self._part.groups > 1 and not reading.whole
        tries = self._collate if reading.compare and sliced and collectives.rank() == 0 else None
        self._order.begin(first_step)
        place = self._order.lengths.locate(first_step) if first_step else Place(0, 0)
        # An order of unknown length is read from its beginning, and completed steps are dropped.
        (first_epoch, skip), step = (Place(0, 0), 0) if place is None else (place, first_step)
        plan = _Plan(self._order, self._slice, step, first_step)
        for epoch in epochs_from(first_epoch, epochs):
            new = loader is None or (not reading.options and known != plain_attributes(self._dataset))
            self._begin_epoch(epoch)
            if loader is None or new:
                loader, known = self._torch_loader(plan), plain_attributes(self._dataset)
            plan.epoch, plan.skip, before = epoch, skip, plan.step
            with explain_pickling(self._batches.collate, dict(reading.options).get("worker_init_fn")):
                batches = self._starts.first(loader)
            for batch in batches:
                micro = plan.planned.popleft()
                micro.batch = batch
                if watch is not None and micro.group == 0:
                    watch.add(micro.step, micro.epoch, micro.content)
                if compare:
                    compare = False
                    require_same_samples(self._dataset, self._seed, micro.epoch, self._first, reading.workers)
                if tries is not None:
                    try_collate(self._dataset, tries, self._seed, (micro.epoch, self._first), reading.workers)
                    tries = None
                yield micro
            if plan.step == before:
                raise no_samples()
            if epochs != 1:
                self._order.lengths.check("sampler", epoch, skip + plan.step - before)
            skip = 0

    def _torch_loader(self, plan: _Plan) -> DataLoader[Any]:
        reading = self._reading
        return DataLoader(
            self._timed or self._batches,
            batch_sampler=plan,
            num_workers=reading.workers,
            collate_fn=unchanged,
            pin_memory=reading.pin_memory,
            persistent_workers=reading.workers > 0 and reading.persistent,
            generator=torch.Generator(),  # otherwise creating an iterator would advance the global RNG
            **reading.for_dataset(self._dataset),
        )

    def _begin_epoch(self, epoch: int) -> None:
        self._batches.begin_epoch(epoch)
        samples = self._batches.count
        if isinstance(self._order, FormulaOrder) and samples != self._order.n:
            raise DataError(
                "length-changed",
                f"{type(self._dataset).__name__} has {samples} samples in epoch {epoch}, but had {self._order.n} when "
                "training began.",
            )

    def _slice(self, indices: Sequence[Any], epoch: int, step: int) -> Iterator[tuple[MicroBatch, Part]]:
        self._first = self._first or indices
        content = content_of(indices) if self._watched else 0
        for share in self._slices[len(indices)]:
            own = own_or_placeholder(indices, share)
            part = (epoch, indices, share.rows) if self._reading.whole else (epoch, own, None)
            yield micro_of(None, share, len(indices), epoch, step, own, content), part


class LaterLoader(Loader):
    """A loader of data that the run began to read at epoch and step `begins`, after other data."""

    def __init__(self, own: Loader, begins: Place) -> None:
        self._own, self._begins = own, begins
        self.input, self.repeatable = own.input, own.repeatable
        self.lengths = own.lengths.beginning_at(begins)

    @property
    def samples(self) -> int | None:
        return self._own.samples

    def fingerprint(self) -> Any:
        return self._own.fingerprint()

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        own_epochs = None if epochs is None else epochs - self._begins.epoch
        for micro in self._own.micros(first_step - self._begins.skip, own_epochs):
            micro.step += self._begins.skip
            micro.epoch += self._begins.epoch
            yield micro


class _Plan:
    """Batch sampler for torch's loader: yields what to read, and records the micro-batch of each."""

    def __init__(
        self,
        order: SampleOrder,
        sliced: Callable[[Any, int, int], Iterator[tuple[MicroBatch, Part]]],
        step: int,
        first_step: int,
    ) -> None:
        self._order, self._sliced, self.step, self._first_step = order, sliced, step, first_step
        self.epoch = self.skip = 0  # which epoch is read next, and the steps of it that are left out
        self.planned: deque[MicroBatch] = deque()

    def __iter__(self) -> Iterator[Any]:
        for indices in self._order.epoch(self.epoch, self.skip):
            for micro, part in self._sliced(indices, self.epoch, self.step) if self.step >= self._first_step else ():
                self.planned.append(micro)
                yield part
            self.step += 1


class StartTimes:
    """Seconds of waiting for workers that are started anew."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def first(self, items: Iterable[T]) -> Iterator[T]:
        began = perf_counter()
        rest = iter(items)
        first = list(islice(rest, 1))
        self._seconds += perf_counter() - began
        return chain(first, rest)

    def read(self) -> float:
        return self._seconds


def _start_worker(dataset: Any, function: Callable[[int], Any] | None, worker: int) -> None:
    """Call the user's `worker_init_fn` in a worker, where get_worker_info() has the user's dataset, as in torch."""
    object.__setattr__(get_worker_info(), "dataset", dataset)  # it refuses assignments
    if function is not None:
        function(worker)


def unchanged(batch: Any) -> Any:
    """A collate function for what is collated already."""
    return batch


def own_or_placeholder(indices: Sequence[Any], share: BatchSlice) -> Sequence[Any]:
    """The indices of this rank. A rank without samples runs the first sample of the group with weight zero."""
    start, stop = share.rows
    return indices[start:stop]


def micro_of(
    batch: Any, share: BatchSlice, total: int, epoch: int, step: int, indices: Sequence[Any], content: int = 0
) -> MicroBatch:
    group, last, start = share.group, share.last, share.start
    return MicroBatch(batch, share.samples, start, total, group, last, epoch, step, indices, content)


def no_samples() -> DataError:
    return DataError(
        "empty",
        "An epoch over this data yielded no samples.",
        why="the dataset is empty, or a generator was already consumed",
        fix="check the length of the dataset; pass an iterable that can be iterated repeatedly, not a generator",
    )


class TimedReading(Dataset[Any]):
    """A dataset of batches for torch's loader, in `workers` processes, which measure how long reading takes. The sums
    of each worker are in shared memory, where the training process reads them at log points."""

    def __init__(self, dataset: Any, workers: int) -> None:
        self._dataset = dataset
        self._sums = RawArray("d", 2 * workers)  # seconds and batches of each worker, which alone writes them

    def __getitems__(self, keys: Any) -> Any:
        began = perf_counter()
        batch = self._dataset.__getitems__(keys)
        worker = get_worker_info()
        if worker is not None:
            self._sums[2 * worker.id] += perf_counter() - began
            self._sums[2 * worker.id + 1] += 1.0
        return batch

    def read(self) -> tuple[float, float]:
        """Seconds and batches so far, of all workers."""
        sums = list(self._sums)
        return sum(sums[::2]), sum(sums[1::2])
