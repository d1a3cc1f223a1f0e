"""The loader: this rank's micro-batches, in an order that does not depend on ranks or workers.

It stands on `torch.utils.data.DataLoader` for workers and pinned memory, and feeds it one endless stream of index
lists, so workers live through all epochs. Its whole state is one integer: the number of steps done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from paceline.data.batches import apply
from paceline.data.sample_order import FormulaOrder, SampleOrder
from paceline.data.seeded_dataset import SeededSamples
from paceline.data.slicing import BatchSlice, shares
from paceline.errors import DataError
from paceline.runtime.rng import preserve_rng_state


@dataclass(slots=True)
class MicroBatch:
    """What one rank puts through the model at once, and where that lies in the run."""

    batch: Any
    samples: int  # this rank's own; 0 when it only joins in with a stand-in
    start: int  # where they begin in the step
    step_samples: int  # in the whole step, over all ranks
    group: int
    last: bool  # whether this group closes the step
    epoch: int
    step: int  # counted from the run's beginning
    indices: Sequence[Any] = ()  # which samples these are, where the dataset has indices
    exact: bool = True  # whether every rank knows step_samples without asking the others

    def pin_memory(self) -> MicroBatch:
        """Asked for by torch's loader, which knows nothing of this class."""
        return replace(self, batch=apply(self.batch, torch.Tensor.pin_memory))


@dataclass(frozen=True)
class DataShard:
    """One rank's part in the work: its number among the data ranks, and the groups a step is cut into."""

    rank: int = 0
    ranks: int = 1
    groups: int = 1


class Loader(Protocol):
    """Micro-batches from a given step on, epoch after epoch, until nobody asks for more."""

    @property
    def repeatable(self) -> bool:
        """Whether asking for a step again gives the same samples again."""
        ...

    @property
    def steps_per_epoch(self) -> int | None: ...

    @property
    def samples(self) -> int | None:
        """In an epoch, where that is known."""
        ...

    def micros(self, first_step: int, epochs: int | None) -> Iterator[MicroBatch]: ...

    def fingerprint(self) -> Any:
        """Numbers that are the same on every rank where the data is; None where nothing is known of it."""
        ...


@dataclass(frozen=True)
class ReadOptions:
    """How samples become batches."""

    collate: Callable[[list[Any]], Any] | None = None
    workers: int = 0
    pin_memory: bool = False
    options: tuple[tuple[str, Any], ...] = ()  # further DataLoader arguments, taken from a loader of the user's


class IndexedLoader:
    """For datasets that can be asked for any sample."""

    def __init__(self, dataset: Any, order: SampleOrder, part: DataShard, seed: int, reading: ReadOptions) -> None:
        self._samples = SeededSamples(dataset, seed, own_collate=reading.collate not in (None, default_collate))
        self._order, self._part, self._reading = order, part, reading

    @property
    def repeatable(self) -> bool:
        return isinstance(self._order, FormulaOrder)

    @property
    def steps_per_epoch(self) -> int | None:
        return self._order.steps_per_epoch

    @property
    def samples(self) -> int | None:
        return self._samples.count

    def fingerprint(self) -> Any:
        return self._samples.fingerprint()

    def micros(self, first_step: int = 0, epochs: int | None = None) -> Iterator[MicroBatch]:
        planned: deque[MicroBatch] = deque()
        reading = self._reading
        loader = DataLoader(
            self._samples,
            batch_sampler=_Keys(self._plan(first_step, epochs), planned),
            num_workers=reading.workers,
            collate_fn=reading.collate,
            pin_memory=reading.pin_memory,
            generator=torch.Generator(),  # else making an iterator would draw from the model's random state
            **dict(reading.options),
        )
        # With workers the generators that get seeded are theirs; without, they are the model's and are given back.
        keep = preserve_rng_state if self._samples.draws and reading.workers == 0 else nullcontext
        batches = iter(loader)
        while True:
            with keep():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            micro = planned.popleft()
            micro.batch = batch
            yield micro

    def _plan(self, first_step: int, epochs: int | None) -> Iterator[MicroBatch]:
        """Every micro-batch to come, still without its data."""
        per_epoch = self.steps_per_epoch
        # An order that does not know its length is read from its beginning, and what was used is dropped.
        first_epoch, skip = divmod(first_step, per_epoch) if per_epoch else (0, 0)
        step = first_epoch * (per_epoch or 0) + skip
        for epoch in range(first_epoch, epochs) if epochs is not None else count(first_epoch):
            before = step
            for indices in self._order.epoch(epoch, skip):
                if step >= first_step:
                    yield from self._micros_of(indices, epoch, step)
                step += 1
            if step == before:
                raise no_samples()
            skip = 0

    def _micros_of(self, indices: Sequence[Any], epoch: int, step: int) -> Iterator[MicroBatch]:
        part = self._part
        for share in shares(len(indices), self._order.batch, part.groups, part.rank, part.ranks):
            yield micro_of(None, share, len(indices), epoch, step, own_or_stand_in(indices, share))


class _Keys:
    """The batch sampler that torch's loader asks: hands out index lists and notes what each of them is."""

    def __init__(self, plan: Iterator[MicroBatch], planned: deque[MicroBatch]) -> None:
        self._plan, self._planned = plan, planned

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        for micro in self._plan:
            self._planned.append(micro)
            yield [(micro.epoch, index) for index in micro.indices]


def own_or_stand_in(indices: Sequence[Any], share: BatchSlice) -> Sequence[Any]:
    """This rank's indices; without any, the group's first, which it then runs with weight zero to keep in step."""
    start, stop = share.rows
    return indices[start:stop]


def micro_of(batch: Any, share: BatchSlice, total: int, epoch: int, step: int, indices: Sequence[Any]) -> MicroBatch:
    return MicroBatch(
        batch=batch,
        samples=share.samples,
        start=share.start,
        step_samples=total,
        group=share.group,
        last=share.last,
        epoch=epoch,
        step=step,
        indices=indices,
    )


def no_samples() -> DataError:
    return DataError(
        "empty",
        "An epoch of this data gave no sample.",
        why="the dataset is empty, or an iterator that can be read only once was read before",
        fix="check the dataset's length; give an iterable that can be iterated again, not a generator",
    )
