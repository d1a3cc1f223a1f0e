"""Random numbers of a source of data, from the global generators but apart from those of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy
import torch
from torch.utils.data._utils.worker import _generate_state

from paceline.runtime.generator_states import exchange_states, save_states
from paceline.runtime.rng import seed_cpu

T = TypeVar("T")


class RandomStream:
    """An independent sequence for the global CPU generators. It continues where it left off when entered again."""

    def __init__(self, seed: int, numpy_seed: Any = None) -> None:
        self._outside = save_states()
        seed_cpu(seed)
        if numpy_seed is not None:
            numpy.random.seed(numpy_seed)
        self._stream = exchange_states(self._outside)

    @classmethod
    def of_worker(cls, seed: int) -> RandomStream:
        """The sequence of the first worker of a DataLoader whose generator has this seed."""
        base = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)))
        return cls(base, _generate_state(base, 0))

    def __enter__(self) -> None:
        self._outside = exchange_states(self._stream, self._outside)

    def __exit__(self, *exc: object) -> None:
        self._stream = exchange_states(self._outside, self._stream)

    def read(self, items: Iterator[T]) -> Iterator[T]:
        """Compute each item with the numbers of this sequence; the consumer keeps its own."""
        while True:
            self._outside = exchange_states(self._stream, self._outside)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._stream = exchange_states(self._outside, self._stream)
            yield item
