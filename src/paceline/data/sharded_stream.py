"""Loaders for streams of which each rank reads its own shard.

Every rank reads its share of the global batch from its shard, with all its workers. Shards may have different lengths,
also because workers end with a short batch: ranks exchange the number of their samples in every step, and a rank that
has none left joins with weight zero until all shards have ended. No sample is lost, and weights are exact.

A stream declares that it is split across ranks by the attribute `sharded = True`, or because a library split it:

    datasets.distributed.split_dataset_by_node(stream, rank, world_size)
    webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node)
    datapipe.sharding_filter()                                                 in a DataLoader
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from paceline.data.batches import Kind, apply, layout_of, rows_of, samples_in, sketch
from paceline.data.epoch_reader import EpochReader, lists_of
from paceline.data.iterable import UserBatches, read_in_workers, source_of_batches
from paceline.data.loader import DataShard, Loader, MicroBatch, ReadOptions, StartTimes, epochs_from, no_samples
from paceline.errors import DataError
from paceline.plan.slicing import slice_bounds
from paceline.plan.slow_input import InputSource
from paceline.plan.slow_input import Kind as KindOfInput
from paceline.runtime import collectives
from paceline.runtime.generator_states import RandomStream
from paceline.runtime.objects import message_device

_COMPARED = 64  # samples of each rank and worker that are compared with those of others
_NEEDED = 4  # distinct ones among them; fewer may be equal by chance
_DEPTH = 3  # of streams inside streams


@dataclass
class Share:
    """The samples of this rank in one step, collated by accumulation group; a group without any has a placeholder."""

    samples: int
    batches: list[Any]
    worker: int = 0
    # Of the first share of a worker:
    rows: tuple[int, ...] = ()  # checksums of its first samples
    placeholder: Any = None  # one sample, for steps in which this rank has none left

    def pin_memory(self) -> Share:
        """Called by torch's pin-memory thread on custom batch types."""
        batches, placeholder = apply([self.batches, self.placeholder], torch.Tensor.pin_memory)
        return replace(self, batches=batches, placeholder=placeholder)


class Shares(Protocol):
    """The shares of this rank in an epoch."""

    input: InputSource

    def begin(self, step: int) -> None: ...

    def epoch(self, epoch: int) -> Iterator[Share]: ...


class SampleShares:
    """An IterableDataset that is split across ranks, and across workers if it knows about them."""

    def __init__(
        self, dataset: Any, size: int, groups: int, seed: int, reading: ReadOptions, *, drop_last: bool
    ) -> None:
        self._dataset, self._size, self._groups, self._seed = dataset, size, groups, seed
        self._reading, self._drop_last = reading, drop_last
        self._collate = reading.collate or default_collate
        self._starts = StartTimes()
        kind: KindOfInput = "loader" if reading.options else "dataset"
        self.input = InputSource(kind, reading.workers, started=self._starts.read if reading.workers else None)
        self._reader = EpochReader(dataset, seed, random=RandomStream.of_worker)
        self.begin = self._reader.begin

    def epoch(self, epoch: int) -> Iterator[Share]:
        first: dict[tuple[int, ...], int] = {}
        for share in self._epoch(epoch):
            if len(set(share.rows)) >= _NEEDED and first.setdefault(share.rows, share.worker) != share.worker:
                raise DataError(
                    "same-samples",
                    f"Workers {first[share.rows]} and {share.worker} of a rank read the same samples.",
                    why="every worker runs a copy of the stream; without get_worker_info() it yields all of it again",
                    fix="split the stream with torch.utils.data.get_worker_info(), or set workers=1",
                )
            yield share

    def _epoch(self, epoch: int) -> Iterable[Share]:
        if self._reading.workers:
            return self._starts.first(read_in_workers(self._dataset, epoch, self._shares, self._seed, self._reading))
        shares = self._reader.epoch(epoch, self._shares)
        return map(Share.pin_memory, shares) if self._reading.pins else shares

    def _shares(self, samples: Iterator[Any]) -> Iterator[Share]:
        worker = getattr(get_worker_info(), "id", 0)
        for number, chunk in enumerate(lists_of(self._size)(samples)):
            if self._drop_last and len(chunk) < self._size:
                return
            bounds = [slice_bounds(len(chunk), self._groups, group) for group in range(self._groups)]
            share = Share(len(chunk), [self._collate(chunk[start:stop] or chunk[:1]) for start, stop in bounds], worker)
            if number == 0:
                share.rows = tuple(sketch(sample) for sample in chunk[:_COMPARED])
                share.placeholder = self._collate(chunk[:1])
            yield share


class BatchShares:
    """An iterable of this rank's own batches."""

    def __init__(self, source: Iterable[Any], groups: int, seed: int, kind: Kind | None) -> None:
        self._reader, self._groups, self._kind = EpochReader(source, seed), groups, kind
        self._starts = StartTimes()
        self.begin, self.input = self._reader.begin, source_of_batches(source, self._starts)

    def epoch(self, epoch: int) -> Iterator[Share]:
        for number, batch in enumerate(self._starts.first(self._reader.epoch(epoch))):
            own = samples_in(batch, self._kind)
            bounds = [slice_bounds(own, self._groups, group) for group in range(self._groups)]
            batches = [
                batch if stop - start == own else rows_of(batch, start, max(stop, start + 1), self._kind)
                for start, stop in bounds
            ]
            share = Share(own, batches, placeholder=batch if number == 0 else None)
            if number == 0 and layout_of(batch, self._kind) is not None:  # otherwise its samples are unclear
                samples = [rows_of(batch, row, row + 1, self._kind) for row in range(min(own, _COMPARED))]
                share.rows, share.placeholder = tuple(map(sketch, samples)), samples[0]
            yield share


class ShardedStream(Loader):
    """Micro-batches of this rank's shard, in the steps of all ranks."""

    def __init__(self, shares: Shares, part: DataShard, *, drop_last: bool = False) -> None:
        self._shares, self._part, self._drop_last = shares, part, drop_last
        self.input = shares.input
        self._placeholder: Any = None
        self._compared = False

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        step = 0
        self._shares.begin(first_step)
        for epoch in epochs_from(0, epochs):
            before, shares = step, self._shares.epoch(epoch)
            while True:
                share = next(shares, None)
                samples = self._exchange(share)
                if sum(samples) == 0 or (self._drop_last and 0 in samples):
                    break
                if step >= first_step:
                    yield from self._step(share, samples, epoch, step)
                step += 1
            if step == before:
                raise no_samples()

    def _exchange(self, share: Share | None) -> list[int]:
        """The samples of each data rank in the next step. Collective, in the order of steps on every rank."""
        part, own = self._part, 0 if share is None else share.samples
        if share is not None and share.placeholder is not None:
            self._placeholder = share.placeholder
        if part.ranks == 1:
            return [own]
        if not self._compared:
            self._compared = True
            self._compare(() if share is None else share.rows)
        samples = torch.zeros(part.ranks, dtype=torch.int64, device=message_device(None))
        samples[part.rank] = own
        collectives.all_reduce(samples, "max")
        return samples.tolist()

    def _compare(self, rows: tuple[int, ...]) -> None:
        """Before the first step: every rank needs a placeholder, and shards must differ."""
        ranks = self._part.ranks
        gathered = collectives.all_gather_object([self._part.rank, self._placeholder is not None, list(rows)])
        without = sorted({data_rank for data_rank, has_any, _ in gathered if not has_any})
        if without and any(has_any for _, has_any, _ in gathered):
            raise DataError(
                "empty-shard", f"The shards of data ranks {', '.join(map(str, without))} of {ranks} have no samples."
            )
        _require_different([(data_rank, shard) for data_rank, _, shard in gathered])

    def _step(self, share: Share | None, samples: list[int], epoch: int, step: int) -> Iterator[MicroBatch]:
        part, total, before = self._part, sum(samples), 0
        for group in range(part.groups):
            bounds = [slice_bounds(number, part.groups, group) for number in samples]
            sizes = [stop - start for start, stop in bounds]
            yield MicroBatch(
                batch=self._placeholder if share is None else share.batches[group],
                samples=sizes[part.rank],
                start=before + sum(sizes[: part.rank]),
                step_samples=total,
                group=group,
                last=group == part.groups - 1,
                epoch=epoch,
                step=step,
            )
            before += sum(sizes)


def _require_different(shards: list[tuple[int, list[int]]]) -> None:
    """Data ranks must read different samples, and ranks of one data rank the same."""
    seen: dict[tuple[int, ...], int] = {}
    for data_rank, rows in shards:
        other = seen.setdefault(tuple(rows), data_rank) if len(set(rows)) >= _NEEDED else data_rank
        if other != data_rank:
            raise DataError(
                "same-samples",
                f"The shards of data ranks {other} and {data_rank} begin with the same samples.",
                why="the stream is read as sharded, so ranks must yield different samples; these would count twice",
                fix="split the stream by rank, or set data.sharded: false (data={'sharded': False} in Python)",
            )


def require_order(loader: object) -> None:
    if isinstance(loader, (ShardedStream, UserBatches)):
        raise DataError(
            "no-order", "predict() returns outputs in the order of the data, but each rank reads its own shard of it."
        )


@dataclass(frozen=True)
class Declared:
    """A declaration found in a stream. `rank` is None if any rank may read it."""

    by: str
    rank: int | None = None
    ranks: int | None = None


def is_sharded(data: Any, setting: bool | None, part: DataShard) -> bool | None:
    """Whether each rank reads its own shard of a stream; None if nothing is known. `setting` is `data.sharded`."""
    streams = (data, getattr(data, "source", None), *_inside(data))
    own = next((said for each in streams if isinstance(said := getattr(each, "sharded", None), bool)), None)
    found = declared(data)
    if found is None or found.ranks == 1:
        return setting if own is None else own
    said = own if own is not None else setting
    if said is False:
        raise wrong_shard(f"it is split across ranks by {found.by}, but `sharded` is false")
    if found.rank is not None and (found.rank, found.ranks) != (part.rank, part.ranks):
        expected = f"data rank {part.rank} of {part.ranks}"
        raise wrong_shard(f"{found.by} split it for rank {found.rank} of {found.ranks}, but this is {expected}")
    return True


def wrong_shard(what: str) -> DataError:
    return DataError("wrong-shard", f"The shard of this stream does not match the layout: {what}.")


def _inside(data: Any) -> Iterator[Any]:
    """The dataset of a DataLoader, also behind an iterable of batches."""
    for loader in (data, getattr(data, "source", None)):
        if isinstance(loader, DataLoader):
            yield loader.dataset


def declared(data: Any, depth: int = _DEPTH) -> Declared | None:
    """The declaration of a stream, or of a stream inside it. No library is imported for it."""
    split: Any = getattr(data, "_distributed", None)  # of the library `datasets`
    if hasattr(split, "rank") and hasattr(split, "world_size"):
        return Declared("split_dataset_by_node", split.rank, split.world_size)
    if type(data).__name__ == "ShardingFilterIterDataPipe" and data.num_of_instances > 1:
        return Declared("apply_sharding", data.instance_id, data.num_of_instances)
    if type(data).__name__ == "ResampledShards":
        return Declared("webdataset.ResampledShards")
    # With a batch size, the stream is read without its DataLoader.
    if isinstance(data, DataLoader) and data.batch_size is None and _has_sharding_filter(data.dataset):
        return Declared("sharding_filter", collectives.rank(), collectives.world())
    stages = getattr(data, "pipeline", None)
    stages = list(stages) if isinstance(stages, (list, tuple)) else []
    names = {getattr(getattr(stage, "func", stage), "__name__", "") for stage in stages}
    if "split_by_node" in names:
        return Declared("webdataset.split_by_node", collectives.rank(), collectives.world())
    for value in [*stages, *getattr(data, "__dict__", {}).values()] if depth else ():
        split = getattr(value, "_distributed", None) is not None or type(value).__name__ == "ResampledShards"
        if (split or isinstance(value, (IterableDataset, DataLoader))) and (found := declared(value, depth - 1)):
            return found
    return None


def _has_sharding_filter(dataset: Any, depth: int = 32) -> bool:
    """torch's DataLoader makes such a filter keep the shard of this rank and worker."""
    while dataset is not None and depth:
        if type(dataset).__name__ == "ShardingFilterIterDataPipe":
            return True
        inner = (getattr(dataset, name, None) for name in ("source_datapipe", "datapipe", "_datapipe"))
        dataset, depth = next((pipe for pipe in inner if pipe is not None), None), depth - 1
    return False
