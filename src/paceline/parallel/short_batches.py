"""Runs the short last batch of an epoch eagerly instead of compiling for its size.

Compiling takes longer than the batch does, and from the second size on torch compiles for any size, with slower kernels
for the usual one. Batches of other sequence lengths are left to torch, which compiles for any length after the second.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from paceline.runtime import noise

# Sizes that keep changing are worth a compilation: more than a few short batches, and a good part of all batches.
_FEW, _PART = 16, 4

_is_eager: ContextVar[bool] = ContextVar("paceline_short_batch", default=False)


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
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        samples = noise.local_samples()
        rare = samples is not None and self._sizes[torch.is_grad_enabled()].is_rare(samples)
        context = EagerForward() if rare else nullcontext()
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class EagerForward:
    """In this context nothing is compiled."""

    def __enter__(self) -> None:
        self._token = _is_eager.set(True)
        self._stance = torch.compiler.set_stance("eager_on_recompile")

    def __exit__(self, *error: Any) -> None:
        self._stance.__exit__(None, None, None)
        _is_eager.reset(self._token)


def is_eager() -> bool:
    """Whether the current forward is that of a short batch. What is recomputed in the backward must be so too."""
    return _is_eager.get()
