"""Noise that does not depend on the number of ranks.

    latent = mean + scale * paceline.noise(mean)

Noise drawn from a rank's generator changes with the number of ranks. In a training step, `noise` draws for the global
batch from (seed, step) and returns the rows of the samples in the model, so neither the number of ranks nor gradient
accumulation changes it. Elsewhere it is `torch.randn_like`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.runtime.rng import derive_seed


class Samples(Protocol):
    """The position of samples in the global batch: a micro-batch of a loader, for example."""

    samples: int  # on this rank; 0 for a placeholder batch
    start: int  # of the first one in its step
    step_samples: int  # in the step, on all ranks
    step: int


@dataclass
class _Rows:
    samples: int
    start: int
    step_samples: int
    step: int


class NoiseContext:
    """In this context `noise` draws for `samples`, the samples in the model; None: like `torch.randn_like`.

    A training loop enters it once and sets `samples` and `draws` for each micro-batch: entering a context each time
    would cost microseconds.
    """

    __slots__ = ("_seed", "_token", "draws", "samples")

    def __init__(self, seed: int, samples: Samples | None = None, draws: int = 0) -> None:
        self._seed, self.samples, self.draws = seed, samples, draws

    def __enter__(self) -> NoiseContext:
        self._token = _current.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._token)

    def next_seed(self, samples: Samples) -> int:
        """A different seed for each draw for the same samples."""
        self.draws += 1
        return derive_seed(self._seed, samples.step, self.draws - 1)

    def copy(self) -> NoiseContext:
        """A context that repeats the draws that follow in this one."""
        return NoiseContext(self._seed, self.samples, self.draws)

    def select(self, start: int, count: int) -> NoiseContext:
        """A copy for `count` of the samples in the model, from `start` on."""
        rows, batch = None, self.samples
        if batch is not None:
            rows = _Rows(count, batch.start + start, batch.step_samples, batch.step)
        return NoiseContext(self._seed, rows, self.draws)


_current: ContextVar[NoiseContext | None] = ContextVar("paceline_noise", default=None)


current = _current.get


def local_samples() -> int | None:
    """The number of samples in the model on this rank: 0 for a placeholder batch, which must not count in statistics;
    None outside of a step."""
    context = _current.get()
    return None if context is None or context.samples is None else context.samples.samples


def noise(like: Tensor) -> Tensor:
    """Standard normal noise with the shape, dtype and device of `like`, whose first dim is the batch."""
    context = _current.get()
    samples = None if context is None else context.samples
    if context is None or samples is None:
        return torch.randn_like(like)
    count = samples.samples or 1  # a placeholder batch has one row, possibly after the last one of the step
    if like.shape[:1] != (count,):
        raise ModelError(
            "noise-rows",
            f"noise() expected {count} samples in the first dim, got shape {tuple(like.shape)}.",
            why="noise is drawn per sample, so that it does not depend on the number of ranks",
            fix="draw with the samples as first dim, and reshape afterwards",
        )
    generator = torch.Generator(like.device)
    generator.manual_seed(context.next_seed(samples))
    rows, stop = samples.step_samples, samples.start + count
    shape = (max(rows, stop), *like.shape[1:])
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)[samples.start : stop]
