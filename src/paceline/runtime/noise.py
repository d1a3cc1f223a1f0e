"""Noise that is the same on any number of ranks.

    latent = mean + scale * paceline.noise(mean)

Noise inside a model that is drawn from a rank's own generator changes with the number of ranks. Inside a training
step, `noise` draws for the whole global micro-batch from (seed, step, group) and returns this rank's rows. Elsewhere
it is `torch.randn_like`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runtime.seeds import mix


@dataclass
class _Draw:
    """Where in the global micro-batch this rank's rows lie, and the generator of the next call."""

    key: int
    start: int
    rows: int
    calls: int = 0


_draw: ContextVar[_Draw | None] = ContextVar("paceline_noise", default=None)


@contextmanager
def drawing(seed: int, step: int, group: int, *, start: int, rows: int) -> Iterator[None]:
    """Within this context `noise` belongs to a group of `rows` samples, of which this rank's begin at `start`."""
    token = _draw.set(_Draw(mix(seed, step, group), start, rows))
    try:
        yield
    finally:
        _draw.reset(token)


def noise(like: Tensor) -> Tensor:
    """Standard normal noise of the shape, dtype and device of `like`, whose first dim is the samples."""
    draw = _draw.get()
    if draw is None:
        return torch.randn_like(like)
    generator = torch.Generator(like.device)
    generator.manual_seed(mix(draw.key, draw.calls))
    draw.calls += 1
    # A rank without samples of its own still runs one, with weight zero: it may read past the last row.
    rows = max(draw.rows, draw.start + like.shape[0])
    whole = torch.randn((rows, *like.shape[1:]), generator=generator, dtype=like.dtype, device=like.device)
    return whole[draw.start : draw.start + like.shape[0]]
