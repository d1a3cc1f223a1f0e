"""Loaders for data that can only be iterated.

A stream of samples (an IterableDataset) is read whole by every rank, which keeps its own part by the same arithmetic
as everywhere: the run then means the same on any number of ranks, and a stream that knows nothing of ranks or workers
can't be counted twice. Resuming reads and drops what was used, so it is exact only where the stream repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from paceline.data.batches import rows_of, samples_in
from paceline.data.loader import Cut, Micro, Reading, micro_of, no_samples, own_or_stand_in
from paceline.data.slices import shares
from paceline.runtime.seeds import mix


class SampleStream:
    """An IterableDataset of samples: cut and collated in one worker process, which also keeps its randomness apart."""

    steps_per_epoch = None

    def __init__(self, dataset: Any, batch: int, part: Cut, seed: int, reading: Reading) -> None:
        self._dataset, self._batch, self._part, self._seed = dataset, batch, part, seed
        self._collate = reading.collate or default_collate

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[Micro]:
        step = 0
        for epoch in range(epochs) if epochs is not None else count():
            before = step
            # The worker's generators follow from this one, so that all ranks read one stream even where it shuffles.
            generator = torch.Generator().manual_seed(mix(self._seed, epoch) >> 1)
            cuts = _EpochOfCuts(self._cuts, epoch, step, first_step)
            for micro in DataLoader(cuts, batch_size=None, num_workers=1, collate_fn=_unchanged, generator=generator):
                step = micro.step + micro.last
                if micro.step >= first_step:
                    yield micro
            if step == before:
                raise no_samples()

    def _cuts(self, epoch: int, step: int, first_step: int) -> Iterator[Micro]:
        samples = iter(self._dataset)
        for chunk in iter(lambda: list(islice(samples, self._batch)), []):
            for share in shares(len(chunk), self._batch, self._part.groups, self._part.rank, self._part.ranks):
                batch = self._collate(list(own_or_stand_in(chunk, share))) if step >= first_step else None
                yield micro_of(batch, share, len(chunk), epoch, step, ())
            step += 1


class _EpochOfCuts(IterableDataset[Micro]):
    """One epoch, as the dataset that torch's loader runs in its worker."""

    def __init__(self, cuts: Callable[[int, int, int], Iterator[Micro]], *where: int) -> None:
        self._cuts, self._where = cuts, where

    def __iter__(self) -> Iterator[Micro]:
        return self._cuts(*self._where)


def _unchanged(item: Any) -> Any:
    return item


class BatchStream:
    """Anything that iterates over ready global batches: each rank takes its rows of each."""

    def __init__(self, source: Iterable[Any], part: Cut) -> None:
        self._source, self._part = source, part

    @property
    def steps_per_epoch(self) -> int | None:
        try:
            return len(self._source)  # type: ignore[arg-type]
        except TypeError:
            return None

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[Micro]:
        step = 0
        for epoch in range(epochs) if epochs is not None else count():
            before = step
            for batch in self._source:
                if step >= first_step:
                    yield from self._cut(batch, epoch, step)
                step += 1
            if step == before:
                raise no_samples()

    def _cut(self, batch: Any, epoch: int, step: int) -> Iterator[Micro]:
        total, part = samples_in(batch), self._part
        for share in shares(total, total, part.groups, part.rank, part.ranks):
            start, stop = (share.start, share.stop) if share.samples else (share.group_start, share.group_start + 1)
            yield micro_of(rows_of(batch, start, stop), share, total, epoch, step, ())


class OwnBatches:
    """A DataLoader whose DistributedSampler already picked this rank's samples: its batches, as they come."""

    def __init__(self, loader: DataLoader[Any], ranks: int) -> None:
        self._loader, self._ranks = loader, ranks

    @property
    def steps_per_epoch(self) -> int:
        return len(self._loader)

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[Micro]:
        first_epoch, skip = divmod(first_step, self.steps_per_epoch)
        step = first_step
        for epoch in range(first_epoch, epochs) if epochs is not None else count(first_epoch):
            self._loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            for batch in islice(self._loader, skip, None):
                yield self._micro(batch, epoch, step)
                step += 1
            skip = 0

    def _micro(self, batch: Any, epoch: int, step: int) -> Micro:
        samples = samples_in(batch)
        # DistributedSampler gives every rank equally many, so the product is nearly always right; `exact` tells the
        # step to add up what really came.
        return Micro(
            batch=batch,
            samples=samples,
            start=0,
            group_samples=samples,
            step_samples=samples * self._ranks,
            group=0,
            last=True,
            epoch=epoch,
            step=step,
            exact=False,
        )
