"""Keys of the samples in the model, from which dropout masks are computed.

A key is a 64-bit hash of (seed, step, position of the sample in the global batch), plus that of a scope. None of these
depends on ranks, micro-batches or the layout. A scope is a block of the model, or the code after a block and before the
next one. It counts the calls within it from zero, so that a pipeline stage knows the number of a call without having
run the stages before it. Repeated visits of a block in one forward (tied layers, siamese networks) are numbered.

The keys of a micro-batch are computed on the CPU and copied to the device once, without synchronization.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.runtime.rng import derive_seed, drawn_between, positions

VISIT = 1 << 16  # distance between the call numbers of two visits
_INCREMENT = numpy.uint64(0x9E3779B97F4A7C15)


class Samples(Protocol):
    """The position of samples in the global batch: a micro-batch of a loader, for example."""

    samples: int  # on this rank; 0 for a placeholder batch
    start: int  # of the first one in its step
    step_samples: int  # in the step, on all ranks
    step: int


class Scope:
    """A part of the forward with its own count of calls."""

    __slots__ = ("name", "salt", "visits", "words")

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.visits = name, 0
        # What is added to the keys of samples. A tensor as well: compiled blocks share their code, but not a constant.
        words = numpy.array([derive_seed(crc32(name.encode()), len(name))], dtype=numpy.uint64).view(numpy.int32)
        self.words: tuple[int, ...] = tuple(words.tolist())
        self.salt = torch.from_numpy(words).to(device)


class SavedKeys(NamedTuple):
    """The state of `SampleKeys` at some point of a forward."""

    rows: Tensor | None
    samples: int
    begun: tuple[int, int, int]  # step, position of the first sample, and number of samples of the micro-batch
    visits: list[int]
    current: Scope
    calls: int
    shard: tuple[str, int, int] | None


class Source(Protocol):
    """What tells which samples are in the model."""

    samples: Samples | None
    idle: bool  # whether the keys were not told of them, as there was no dropout so far


class SampleKeys:
    """The keys of the samples in the model, the current scope, and the number of the next call."""

    def __init__(self, seed: int, device: torch.device, blocks: Sequence[str] = ()) -> None:
        """`blocks`: the names of the blocks in the full model, on every layout."""
        self.seed, self.device = seed, device
        self.outside = Scope("", device)
        self.inside = {name: Scope(name, device) for name in blocks}
        self.after = {name: Scope(f"{name} end", device) for name in blocks}
        self.scopes = tuple(self.inside.values())
        self.source: Source | None = None
        self.expected: Samples | None = None  # of the micro-batch that an idle source began
        self.rows: Tensor | None = None  # (samples, 2), int32
        self._given: Tensor | None = None  # the rows of a step, which a captured one reads
        self.current, self.calls, self.samples = self.outside, 0, 0
        self._begun = 0, 0, 0
        self.used: bool | None = None  # whether the model has dropout; None: not known yet
        self.lazy = True  # whether rows are made only if there is dropout: compiled code can't make them later
        self.exact_attention = False  # whether attention on a GPU is computed without a fused kernel
        self.fused_attention = False  # whether it kept it
        self.kept: dict[str, tuple[int, ...]] = {}  # calls that were left to torch, with the shape of the first
        self.watches = True  # whether to look for draws from the global generators in the next micro-batch
        self.drawn: list[str] = []  # the generators that were found
        self.splits = True  # whether the model is called with the batch itself, not with stacked views of its samples
        self.time_major = False  # whether activations of shape (tokens, samples, width) occur
        self.time_major_calls: dict[tuple[str, int], bool] = {}  # by scope and number, where the shape showed it
        # "tokens" or "features" of this rank's activations, its number, and the width of a shard
        self.shard: tuple[str, int, int] | None = None
        self.installed: AbstractContextManager[Any] = nullcontext()  # entered while the keys are active
        self._active = 0

    def activate(self) -> None:
        """Use these keys for dropout from now on."""
        self._active += 1
        if self._active == 1:
            self._outer, active.keys = active.keys, self
            self.installed.__enter__()

    def deactivate(self) -> None:
        self._active -= 1
        if not self._active:
            self.installed.__exit__(None, None, None)
            active.keys, self.samples, self.expected = self._outer, 0, None  # an exception may have ended a step

    @contextmanager
    def uninstalled(self) -> Iterator[None]:
        """While the forwards of blocks are changed."""
        if not self._active:
            yield
            return
        self.installed.__exit__(None, None, None)
        try:
            yield
        finally:
            self.installed.__enter__()

    def begin(self, samples: Samples) -> None:
        """Call before the forward of a micro-batch."""
        self._open(samples)
        self.rows = None if self.used is False else self._rows()
        self.current, self.calls, self.shard = self.outside, 0, None
        for scope in self.scopes:
            scope.visits = 0
        if self.watches:
            self._before = positions()

    def wake(self) -> bool:
        """Whether an idle source has begun a micro-batch. It is idle no more, and will call `end`."""
        source = self.source
        if source is None or not source.idle or self.expected is None or source.samples is not self.expected:
            return False
        source.idle, self.rows = False, None
        self._open(self.expected)
        return True

    def _open(self, samples: Samples) -> None:
        self.samples = samples.samples or 1  # a placeholder batch has one row
        self._begun = samples.step, samples.start, self.samples

    def end(self) -> None:
        """Call after the backward. Dropout outside of a step is torch's, as is that of a loss without a micro-batch."""
        if not self.samples:
            return
        self.samples, self.used = 0, bool(self.used) if self.lazy else self.used
        if self.watches:
            self.watches, self.drawn = False, drawn_between(self._before, positions())

    def note(self, what: str, shape: tuple[int, ...]) -> None:
        """Record a call that is not computed by sample."""
        if what not in self.kept:
            self.kept[what] = shape

    def offsets_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The coordinates of the first element of this rank, for activations of `shape`, (samples, *coordinates)."""
        if self.shard is None:
            return ()
        kind, rank, width = self.shard
        if kind == "features" and len(shape) <= 3 and shape[-1] != width:
            return ()  # not the output of that layer
        dim = 0 if kind == "tokens" or len(shape) > 3 else len(shape) - 2  # heads come before tokens
        return (*[0] * dim, rank * shape[dim + 1])

    def own(self) -> Tensor | None:
        """The keys of the samples in the current scope."""
        if self.rows is None and self.samples == self._begun[2] and not torch.compiler.is_compiling():
            self.rows = self._rows()  # the first dropout of a run, after its first micro-batch
        return None if self.rows is None else self.rows + self.current.salt

    @contextmanager
    def reading(self, rows: Tensor) -> Iterator[None]:
        """Within this context, take the rows of a step from here."""
        self._given, before = rows, self._given
        try:
            yield
        finally:
            self._given = before

    def of_step(self, step: int, count: int) -> Tensor:
        """The rows of a step, on the CPU."""
        return torch.from_numpy(self._hash(step, 0, count))

    def _rows(self) -> Tensor:
        if self._given is not None:
            return self._given[self._begun[1] :][: self._begun[2]]
        # Not from pinned memory: CUDA copies a few bytes at once, but new pinned memory takes milliseconds.
        return torch.from_numpy(self._hash(*self._begun)).to(self.device, non_blocking=True)

    def _hash(self, step: int, start: int, count: int) -> NDArray[numpy.int32]:
        """Keys of shape (samples, 2)."""
        first = numpy.uint64(derive_seed(self.seed, step))
        values = numpy.arange(start, start + count, dtype=numpy.uint64) * _INCREMENT + first
        # The finalizer of splitmix64.
        values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return (values ^ (values >> numpy.uint64(31))).view(numpy.int32).reshape(count, 2)

    def save(self) -> SavedKeys:
        self.wake()
        visits = [scope.visits for scope in self.scopes]
        return SavedKeys(self.rows, self.samples, self._begun, visits, self.current, self.calls, self.shard)

    def select(self, start: int, count: int, after: str | None = None) -> SavedKeys:
        """The present state, for `count` of the samples in the model, from `start` on; `after`: at the end of a block.
        There are further rows in a padded batch."""
        saved = self.save()
        if after is not None:
            saved = saved._replace(current=self.after[after], calls=0)
        if saved.rows is None:
            return saved._replace(samples=count)
        rows = saved.rows[start : start + count]
        if len(rows) < count:
            rows = torch.cat([rows, saved.rows[-1:].expand(count - len(rows), -1)])
        return saved._replace(rows=rows, samples=count)

    def restore(self, saved: SavedKeys) -> None:
        self.rows, self.samples, self._begun = saved.rows, saved.samples, saved.begun
        for scope, visits in zip(self.scopes, saved.visits, strict=True):
            scope.visits = visits
        self.current, self.calls, self.shard = saved.current, saved.calls, saved.shard


class _Active:
    """The keys in use. Not a ContextVar: compiled code cannot read one, and autograd's threads do not see its value."""

    keys: SampleKeys | None = None


active = _Active()
