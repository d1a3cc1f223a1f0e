"""Reads a sampler, or another source of indices or batches, epoch after epoch: identically on every rank, and from any
epoch on.

A source that uses the global generators runs under a random state of its own, seeded by (seed, epoch). A generator that
belongs to the source is never seeded: its order is that of a plain PyTorch loop. If reading starts in a later epoch,
past epochs are read first, because they advance the generators and other state of the source.

The number of steps in an epoch may change: a sampler changes it in `set_epoch` (a curriculum).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from paceline.log import rank_log
from paceline.runtime import collectives
from paceline.runtime.generator_states import RandomStream
from paceline.runtime.rng import derive_seed

_DEPTH = 4  # of samplers inside samplers
_REPLAYED = 4096  # items of a past epoch that are read at once
_KEPT = 16  # epochs whose generator states are kept; earlier ones are read again
_memories: WeakKeyDictionary[Any, _Memory] = WeakKeyDictionary()
# Epochs compared to find out whether the length changes. A curriculum grows early, or is complete at the last of them.
_COMPARED = (1, 2, 3, 5, 10, 30, 100, 1000)


@dataclass
class _Memory:
    """What was read from a source. Several loaders may read it: one for each call of `train()`."""

    done: int = 0  # epochs
    starts: dict[int, list[Tensor]] = field(default_factory=dict)  # generator states at the start of epochs
    left: list[Tensor] | None = None  # generator states after the last read; the user may change them in between


class EpochReader:
    """`loader` is the user's DataLoader: torch draws the seed of its workers from its generator in every epoch, before
    the sampler starts (`seed_first`) or after a batch sampler did. `random` makes the random state of an epoch."""

    def __init__(
        self,
        source: Iterable[Any],
        seed: int,
        loader: DataLoader[Any] | None = None,
        *,
        seed_first: bool = True,
        random: Callable[[int], RandomStream] = RandomStream,
    ) -> None:
        self._source, self._seed, self._seed_first, self._random = source, seed, seed_first, random
        self._loader = loader if loader is not None and loader.generator is not None else None
        generators = (each for owner in (source, loader) for each in generators_in(owner))
        self._generators = list(dict.fromkeys(generators))
        stateless = type(source).__module__.startswith("torch.utils.data") or hasattr(source, "set_epoch")
        self._replays = length_of(source) is not None and (bool(self._generators) or not stateless)
        try:
            self._memory = _memories.setdefault(source, _Memory())
        except TypeError:  # not hashable, or without weak references
            self._memory = _Memory()

    def begin(self, step: int) -> None:
        """Reading starts at this step of the run. At step 0 the source is taken as it is, as a plain loop would."""
        if step == 0:
            self._memory.done, self._memory.starts, self._memory.left = 0, {0: self._states()}, self._states()

    def epoch(self, epoch: int, read: Callable[[Iterator[Any]], Iterator[Any]] = iter) -> Iterator[Any]:
        """The items of one epoch, or what `read` makes of them in the random state of the source, which may be
        infinite: it is read lazily."""
        memory, now = self._memory, self._states()
        if memory.left is not None and not all(map(torch.equal, memory.left, now)):
            memory.starts = {epoch: now}
        memory.starts = memory.starts or {0: now}
        first = memory.done
        if self._generators:
            first = max((known for known in memory.starts if known <= epoch), default=epoch)
            for generator, state in zip(self._generators, memory.starts.get(first, now), strict=True):
                generator.set_state(state)
        for past in range(first, epoch) if self._replays else ():
            for _ in self._read(past, lists_of(_REPLAYED)):
                pass
        memory.done = max(memory.done, epoch + 1)
        return self._read(epoch, read)

    def _read(self, epoch: int, read: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        """The random state of the source is swapped in while it is read, which takes 5 µs."""
        announce_epoch(self._source, epoch)
        stream = self._random(derive_seed(self._seed, epoch) >> 1)
        if self._seed_first:
            self._draw_worker_seed(epoch)
        with stream:
            items = iter(self._source)
        if not self._seed_first:
            self._draw_worker_seed(epoch)
        results = stream.read(read(items))
        yield from self._remembered(results) if self._generators else results
        starts = self._memory.starts
        starts[epoch + 1] = self._states()
        for old in sorted(starts)[1:-_KEPT]:
            del starts[old]

    def _remembered(self, results: Iterator[Any]) -> Iterator[Any]:
        for result in results:
            self._memory.left = self._states()
            yield result
        self._memory.left = self._states()

    def _draw_worker_seed(self, epoch: int) -> None:
        if self._loader is not None and not (epoch and self._loader.persistent_workers):
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]


def lists_of(count: int) -> Callable[[Iterator[Any]], Iterator[list[Any]]]:
    return lambda items: iter(lambda: list(islice(items, count)), [])


def announce_epoch(source: Any, epoch: int, depth: int = _DEPTH) -> None:
    """Call `set_epoch` of a source, and of samplers inside a sampler or datasets inside a dataset."""
    set_epoch = getattr(source, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    for part in _inside(source) if depth else ():
        announce_epoch(part, epoch, depth - 1)


def _inside(source: Any) -> list[Any]:
    inner = [getattr(source, "sampler", None)]
    if not isinstance(source, Sampler):  # the dataset of a DistributedSampler is read by others
        several = getattr(source, "datasets", ())
        several = several.values() if isinstance(several, dict) else several
        inner += [getattr(source, "dataset", None), *(several if isinstance(several, Iterable) else ())]
    return [part for part in inner if part is not None]


def plain_attributes(dataset: Any, depth: int = _DEPTH) -> list[dict[str, Any]]:
    """Numbers and text in the attributes of a dataset, and of datasets inside it."""
    values = getattr(dataset, "__dict__", {})
    own = {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}
    inside = _inside(dataset) if depth else []
    return [own, *(each for part in inside for each in plain_attributes(part, depth - 1))]


def generators_in(source: Any, depth: int = _DEPTH) -> list[torch.Generator]:
    """The generators of a sampler or DataLoader, and of the samplers inside it."""
    found: list[torch.Generator] = []
    for part in getattr(source, "__dict__", {}).values() if depth else ():
        if isinstance(part, torch.Generator):
            found.append(part)
        elif isinstance(part, (Sampler, DataLoader)):
            found += generators_in(part, depth - 1)
    return list(dict.fromkeys(found))


@contextmanager
def preserve_generators(source: Any) -> Iterator[None]:
    """Restore the generators of a source after looking at its first item."""
    states = [(generator, generator.get_state()) for generator in generators_in(source)]
    yield
    for generator, state in states:
        generator.set_state(state)


def length_of(source: Any) -> int | None:
    try:
        return len(source)
    except TypeError:
        return None


class Place(NamedTuple):
    """A step of the run, as a position in an epoch."""

    epoch: int
    skip: int  # steps of that epoch before it


class EpochLengths:
    """`count` returns the steps of the epoch that `source` was told last; None if unknown."""

    def __init__(self, source: Any, count: Callable[[], int | None]) -> None:
        self._source, self._count = source, count
        self._known: list[int] = []
        self._warned = False
        self._begins = Place(0, 0)

    def beginning_at(self, begins: Place) -> EpochLengths:
        """Those of data that the run began to read there, after other data."""
        later = copy.copy(self)
        later._begins = begins
        return later

    @cached_property
    def _vary(self) -> bool:
        if not any(hasattr(owner, "set_epoch") for owner in (self._source, getattr(self._source, "sampler", None))):
            return False
        first = self._of(0)
        try:
            return any(self._of(epoch) != first for epoch in _COMPARED)
        except Exception:  # the user's set_epoch may reject epochs beyond its plan
            return False

    @cached_property
    def per_epoch(self) -> int | None:
        """Steps in every epoch; None if unknown, or if they change with the epoch."""
        return None if self._vary else self._count()

    def _of(self, epoch: int) -> int | None:
        announce_epoch(self._source, epoch)
        return self._count()

    def _at(self, epoch: int) -> int:
        while len(self._known) <= epoch:
            self._known.append(self._of(len(self._known)) or 0)
        return self._known[epoch]

    def of(self, epoch: int) -> int | None:
        """Steps in one epoch; None if unknown."""
        return self._at(epoch - self._begins.epoch) if self._vary else self.per_epoch

    def check(self, source: str, epoch: int, steps: int) -> None:
        """Warn, once, if an epoch that was read had another number of steps."""
        expected = self.of(epoch)
        if expected not in (None, steps) and not self._warned:
            self._warned = True
            rank_log(collectives.rank()).warning(
                f"the {source} yielded {steps} batches in epoch {epoch}, but its length says {expected}: epochs end, "
                "and a resumed run continues, where the length says; correct __len__, or remove it"
            )

    def before(self, epoch: int | None) -> int | None:
        """Steps in all epochs before this one; None if unknown."""
        if epoch is None:
            return None
        epochs = max(0, epoch - self._begins.epoch)
        if self._vary:
            return self._begins.skip + sum(self._at(past) for past in range(epochs))
        return None if self.per_epoch is None else self._begins.skip + epochs * self.per_epoch

    def locate(self, step: int) -> Place | None:
        """The position of a step; None if unknown."""
        epoch, step = 0, step - self._begins.skip
        if self._vary:
            while step >= self._at(epoch) > 0:  # an empty epoch is an error when it is read
                step, epoch = step - self._at(epoch), epoch + 1
        elif self.per_epoch:
            epoch, step = divmod(step, self.per_epoch)
        else:
            return None
        return Place(epoch + self._begins.epoch, step)


UNKNOWN = EpochLengths(None, lambda: None)
