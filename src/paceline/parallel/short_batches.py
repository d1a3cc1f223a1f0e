"""Runs the short last batch of an epoch eagerly instead of compiling for its size.

Compiling takes longer than the batch does, and from the second size on torch compiles for any size, with slower kernels
for the usual one. Batches of other sequence lengths are left to torch, which compiles for any length after the second.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from paceline.runtime import noise

# Sizes that keep changing are worth a compilation: more than a few short batches, and a good part of all batches.
_FEW, _PART = 16, 4


@dataclass
class _Sizes:
    largest: int = 0
    batches: int = 0
    short: int = 0

    def is_rare(self, samples: int) -> bool:
        """Whether a batch is smaller than others, and such batches are few."""
        self.batches += 1
        if samples >= self.largest:
            self.largest = samples
            return False
        self.short += 1
        return self.short <= _FEW or self.short * _PART < self.batches


class ShortBatches:
    """The context of every forward of a compiled model. Compiled code that fits the batch still runs."""

    def __init__(self) -> None:
        self._sizes = {True: _Sizes(), False: _Sizes()}  # with and without gradients
        self._entered: list[tuple[noise.NoiseContext | None, AbstractContextManager[Any]]] = []

    def __enter__(self) -> None:
        draw, samples = noise.current(), noise.local_samples()
        rare = samples is not None and self._sizes[torch.is_grad_enabled()].is_rare(samples)
        if draw is not None and rare:
            draw.around = _eager  # what is recomputed in the backward must be so too
        context: AbstractContextManager[Any] = _eager() if rare else nullcontext()
        context.__enter__()
        self._entered.append((draw, context))

    def __exit__(self, *error: Any) -> None:
        draw, context = self._entered.pop()
        context.__exit__(*error)
        if draw is not None:
            draw.around = None


def _eager() -> AbstractContextManager[Any]:
    """In this context nothing is compiled."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("eager_on_recompile")
    return stance
