"""Noise that is the same on any number of ranks.

    latent = mean + scale * paceline.noise(mean)

Noise inside a model that is drawn from a rank's own generator changes with the number of ranks. Inside a training
step, `noise` draws for the whole global micro-batch from (seed, step, group) and returns this rank's rows. Elsewhere
it is `torch.randn_like`.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.runtime.seeds import mix


class drawing:
    """Within this context noise belongs to a group of `rows` samples, of which this rank has `own` from `start` on.

    A class, and its key computed only when somebody draws: this is entered for every micro-batch.
    """

    __slots__ = ("_token", "calls", "coordinates", "own", "rows", "start")

    def __init__(self, seed: int, step: int, group: int, *, start: int, own: int, rows: int) -> None:
        self.coordinates = (seed, step, group)
        self.start, self.own, self.rows, self.calls = start, own, rows, 0

    def __enter__(self) -> None:
        self._token = _draw.set(self)

    def __exit__(self, *exc: object) -> None:
        _draw.reset(self._token)


_draw: ContextVar[drawing | None] = ContextVar("paceline_noise", default=None)


def noise(like: Tensor) -> Tensor:
    """Standard normal noise of the shape, dtype and device of `like`, whose first dim is the samples."""
    draw = _draw.get()
    if draw is None:
        return torch.randn_like(like)
    # A rank without samples of its own still runs one, with weight zero; that one may lie past the last row.
    own = draw.own or 1
    if like.shape[:1] != (own,):
        raise ModelError(
            "noise-rows",
            f"noise() was asked for the shape {tuple(like.shape)}, but this rank holds {own} samples.",
            why="noise belongs to samples: rows that are not samples can't be the same on another number of ranks",
            fix="draw with the samples as first dim, and reshape afterwards",
        )
    generator = torch.Generator(like.device)
    generator.manual_seed(mix(*draw.coordinates, draw.calls))
    draw.calls += 1
    rows = max(draw.rows, draw.start + own)
    whole = torch.randn((rows, *like.shape[1:]), generator=generator, dtype=like.dtype, device=like.device)
    return whole[draw.start : draw.start + own]
