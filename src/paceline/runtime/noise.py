"""Noise that does not depend on the number of ranks.

    latent = mean + scale * paceline.noise(mean)

Noise drawn from a rank's generator changes with the number of ranks. In a training step, `noise` draws for the global
batch from (seed, step) and returns the rows of the samples in the model, so neither the number of ranks nor gradient
accumulation changes it. Elsewhere it is `torch.randn_like`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.runtime.generator_states import marks_now
from paceline.runtime.rng import derive_seed, rewound
from paceline.runtime.sample_keys import SampleKeys, Samples, SavedKeys


class Draw(NamedTuple):
    """Rows of noise that a captured step reads. `fill` draws them before each replay."""

    rows: Tensor
    first: int
    step_samples: int
    number: int  # of the draw, among those for the same samples

    def fill(self, seed: int) -> None:
        self.rows.copy_(_draw(self.rows, seed, self.first, self.step_samples))


class Watch(Protocol):
    checks_again: bool  # whether to call it in any case

    def __call__(self, samples: Any, before: bytes, after: bytes, /) -> None: ...


@dataclass
class _Rows:
    samples: int
    start: int
    step_samples: int
    step: int


class NoiseContext:
    """In this context `noise` draws for `samples`, the samples in the model; None: like `torch.randn_like`. Dropout
    computes its masks from `keys`; None: torch's dropout.

    A training loop enters it once and calls `begin` and `end` for each micro-batch: entering a context each time would
    cost microseconds. While it is `idle`, setting `samples` to None is enough to end one.
    """

    __slots__ = (
        "__weakref__", "_around", "_entered", "_last", "_outer", "_saved", "_seed", "_token",
        "around", "before", "captured", "draws", "idle", "keys", "samples", "watch", "watched",
    )  # fmt: skip

    def __init__(self, seed: int, samples: Samples | None = None, keys: SampleKeys | None = None) -> None:
        self._seed, self.samples, self.keys = seed, samples, keys
        self.draws = 0
        self.captured: dict[tuple[int, int], Draw] | None = None  # by (start, draw), of a step that is captured next
        self._saved: SavedKeys | None = None
        self._last: NoiseContext | None = None  # where the last forward of a custom loop ended
        self.around: Callable[[], AbstractContextManager[Any]] | None = None  # what copies enter as well
        self.watch: Watch | None = None  # called with a micro-batch in which generators were drawn from
        self.before = b""  # the marks of generators at the beginning of a micro-batch that is watched
        self._entered = self.watched = False
        self.idle = keys is None  # whether no dropout has been seen so far

    def __enter__(self) -> NoiseContext:
        _recomputation.__enter__()
        self._token, self._entered = _current.set(self), True
        if self.keys is not None:
            self.keys.activate()
            if self._saved is None:
                self.keys.source = self
            else:
                self._outer = self.keys.save()
                self.keys.restore(self._saved)
        self._around = None if self.around is None else self.around()
        if self._around is not None:
            self._around.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._around is not None:
            self._around.__exit__(*exc)
        if self.keys is not None:
            if self._saved is not None:
                self.keys.restore(self._outer)
            self.keys.deactivate()
        _current.reset(self._token)
        self._entered = False
        _recomputation.__exit__()

    def begin(self, samples: Samples) -> None:
        """Call before the forward of a micro-batch."""
        self.samples, self.draws = samples, 0
        keys = self.keys
        if keys is None:
            return
        if self.watch is not None:
            self.before = marks_now()
        if not self.idle:
            keys.begin(samples)
            return
        # Only blocks are followed: dropout may begin within one. Not in a method, as this runs in every step.
        keys.expected, keys.current, keys.calls, keys.shard = samples, keys.outside, 0, None
        for scope in keys.scopes:
            scope.visits = 0

    def end(self) -> None:
        """Call after the backward of a micro-batch."""
        self.samples = None
        if self.keys is not None:
            self.keys.end()
            self.idle = self.keys.used is False and not self.keys.watches

    def look(self, samples: Any) -> None:
        """Call after `end`: were numbers drawn from a generator, which do not belong to samples?"""
        if self.watch is not None:
            now = marks_now()
            if now != self.before or self.watch.checks_again:
                self.watch(samples, self.before, now)

    def begin_forward(self, samples: Samples) -> None:
        """Call before a forward of a custom loop. A further one of the same samples has other numbers."""
        self.begin(samples)
        last = None if self._last is None else self._last.samples
        if self._last is not None and last is not None and _place(last) == _place(samples):
            self.resume(self._last)

    def end_forward(self, samples: Samples) -> None:
        self._last = self.copy()
        self.end()
        self.look(samples)

    @contextmanager
    def forward_of(self, samples: Samples) -> Iterator[None]:
        self.begin_forward(samples)
        try:
            yield
        finally:
            self.end_forward(samples)

    def uninstalled(self) -> AbstractContextManager[Any]:
        """While the forwards of blocks are changed."""
        return nullcontext() if self.keys is None else self.keys.uninstalled()

    def seed_of(self, step: int, draw: int) -> int:
        return derive_seed(self._seed, step, draw)

    def copy(self) -> NoiseContext:
        """A context that repeats the draws that follow in this one."""
        if self.keys is None or not (self._entered or self._saved is None):
            return self._with(self.samples, self._saved)
        return self._with(self.samples, self.keys.save())

    def resume(self, other: NoiseContext) -> None:
        """Continue with the draws that follow in `other`, a copy."""
        self.samples, self.draws = other.samples, other.draws
        if self.keys is not None and other._saved is not None:
            self.keys.restore(other._saved)

    def select(self, start: int, count: int, after: str | None = None) -> NoiseContext:
        """A copy for `count` of the samples in the model, from `start` on; `after`: behind this block of the model."""
        rows, batch = None, self.samples
        if batch is not None:
            rows = _Rows(count, batch.start + start, batch.step_samples, batch.step)
        return self._with(rows, None if self.keys is None else self.keys.select(start, count, after))

    def _with(self, samples: Samples | None, saved: SavedKeys | None) -> NoiseContext:
        context = NoiseContext(self._seed, samples, self.keys)
        context.draws, context._saved, context.captured = self.draws, saved, self.captured
        context.around = self.around
        return context


def _place(samples: Samples) -> tuple[int, int, int]:
    return samples.step, samples.start, samples.samples


_current: ContextVar[NoiseContext | None] = ContextVar("paceline_noise", default=None)


current = _current.get
_recomputation = rewound(current)


def local_samples() -> int | None:
    """The number of samples in the model on this rank: 0 for a placeholder batch, which must not count in statistics;
    None outside of a step."""
    context = _current.get()
    return None if context is None or context.samples is None else context.samples.samples


def noise(like: Tensor) -> Tensor:
    """Standard normal noise that does not depend on the number of ranks.

    In a training step, the noise of a sample is a function of (seed, step, sample); elsewhere this is
    `torch.randn_like`.

    Args:
        like: a tensor with the shape, dtype and device of the noise; its first dim is the batch

    Returns:
        The noise.

    Raises:
        ModelError: `model.noise-rows`: in a step, the first dim is not the batch

    Example:
        >>> import torch
        >>> import paceline
        >>> mean = torch.zeros(4, 2)
        >>> (mean + 0.1 * paceline.noise(mean)).shape
        torch.Size([4, 2])
    """
    context = _current.get()
    samples = None if context is None else context.samples
    if context is None or samples is None:
        return torch.randn_like(like)
    count = samples.samples or 1  # a placeholder batch has one row, possibly after the last one of the step
    if like.shape[:1] != (count,):
        raise ModelError(
            "noise-rows", f"noise() expected {count} samples in the first dim, got shape {tuple(like.shape)}."
        )
    number, context.draws = context.draws, context.draws + 1  # another one for each draw for the same samples
    known = None if context.captured is None else context.captured.get((samples.start, number))
    if known is not None:
        return known.rows.clone()  # code may change it, and a recomputed forward reads it again
    rows = _draw(like, context.seed_of(samples.step, number), samples.start, samples.step_samples)
    if context.captured is not None:
        context.captured[samples.start, number] = Draw(rows.clone(), samples.start, samples.step_samples, number)
    return rows


def _draw(like: Tensor, seed: int, first: int, step_samples: int) -> Tensor:
    generator = torch.Generator(like.device)
    generator.manual_seed(seed)
    stop = first + len(like)
    shape = (max(step_samples, stop), *like.shape[1:])
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)[first:stop]
