"""Where the samples that a model sees lie in the global batch, and noise that follows from it.

    latent = mean + scale * paceline.noise(mean)

Noise inside a model that is drawn from a rank's own generator changes with the number of ranks. Inside a training
step, `noise` draws for the whole global batch from (seed, step) and returns the rows of the samples in the model, so
neither ranks nor accumulation change it. Elsewhere it is `torch.randn_like`.
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
    """What has to be known of the samples in the model: a loader's micro-batch is one of these."""

    samples: int  # this rank's own; 0 when it only joins in with a stand-in
    start: int  # where they begin in their step
    step_samples: int  # in the step, over all ranks
    step: int


class NoiseContext:
    """Within this context noise belongs to `samples`, the samples that are in the model; None: to nobody.

    A loop enters it once and sets `samples` and `draws` for each micro-batch: two assignments, where a context for each
    would cost microseconds.
    """

    __slots__ = ("_seed", "_token", "draws", "samples")

    def __init__(self, seed: int, here: Samples | None = None) -> None:
        self._seed, self.samples, self.draws = seed, here, 0

    def __enter__(self) -> NoiseContext:
        self._token = _draw.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _draw.reset(self._token)

    def key(self, here: Samples) -> int:
        """Another one at each call for the same samples."""
        self.draws += 1
        return derive_seed(self._seed, here.step, self.draws - 1)

    def from_here(self) -> NoiseContext:
        """Another one that draws what this one would draw from now on."""
        same = NoiseContext(self._seed, self.samples)
        same.draws = self.draws
        return same

    def of_rows(self, start: int, samples: int) -> NoiseContext:
        """Another one for some of the samples that are in the model."""
        here = self.samples
        part = None if here is None else _Rows(samples, here.start + start, here.step_samples, here.step)
        same = NoiseContext(self._seed, part)
        same.draws = self.draws
        return same


@dataclass
class _Rows:
    samples: int
    start: int
    step_samples: int
    step: int


_draw: ContextVar[NoiseContext | None] = ContextVar("paceline_noise", default=None)


def current() -> NoiseContext | None:
    """The context that we are in."""
    return _draw.get()


def own_samples() -> int | None:
    """How many of the samples in the model are this rank's own: 0 for a stand-in, which counts nothing in a statistic;
    None outside a step, where all of them are."""
    draw = _draw.get()
    return None if draw is None or draw.samples is None else draw.samples.samples


def noise(like: Tensor) -> Tensor:
    """Standard normal noise of the shape, dtype and device of `like`, whose first dim is the samples."""
    draw = _draw.get()
    here = None if draw is None else draw.samples
    if draw is None or here is None:
        return torch.randn_like(like)
    # A rank without samples of its own still runs one, with weight zero; that one may lie past the last row.
    own = here.samples or 1
    if like.shape[:1] != (own,):
        raise ModelError(
            "noise-rows",
            f"noise() was asked for the shape {tuple(like.shape)}, but this rank holds {own} samples.",
            why="noise belongs to samples: rows that are not samples can't be the same on another number of ranks",
            fix="draw with the samples as first dim, and reshape afterwards",
        )
    generator = torch.Generator(like.device)
    generator.manual_seed(draw.key(here))
    rows = max(here.step_samples, here.start + own)
    whole = torch.randn((rows, *like.shape[1:]), generator=generator, dtype=like.dtype, device=like.device)
    return whole[here.start : here.start + own]
