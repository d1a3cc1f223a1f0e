"""Random number generators: derived seeds, such as one per (seed, epoch, sample), and the global state."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from math import isnan, nan
from typing import Any, TypeVar

import numpy
import torch
from torch.utils.data._utils.worker import _generate_state

from paceline.runtime.generator_states import exchange_states, save_states

T = TypeVar("T")

_MASK = (1 << 64) - 1


def derive_seed(*parts: int) -> int:
    """A 64-bit hash of integers, the same on every machine (the finalizer of splitmix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on the CPU and all GPUs."""
    seed_cpu(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_cpu(seed: int) -> None:
    """Seed the global CPU generators. Unlike torch.manual_seed, this does not visit all devices."""
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


class RandomStream:
    """An independent sequence for the global CPU generators. It continues where it left off when entered again."""

    def __init__(self, seed: int, numpy_seed: Any = None) -> None:
        with preserve_rng_state():
            seed_cpu(seed)
            if numpy_seed is not None:
                numpy.random.seed(numpy_seed)
            self._stream = save_states()

    @classmethod
    def of_worker(cls, seed: int) -> RandomStream:
        """The sequence of the first worker of a DataLoader whose generator has this seed."""
        base = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(seed)))
        return cls(base, _generate_state(base, 0))

    def __enter__(self) -> None:
        self._global = exchange_states(self._stream)

    def __exit__(self, *exc: object) -> None:
        self._stream = exchange_states(self._global)

    def read(self, items: Iterator[T]) -> Iterator[T]:
        """Compute each item with the numbers of this sequence; the consumer keeps its own."""
        while True:
            outside = exchange_states(self._stream)
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self._stream = exchange_states(outside)
            yield item


class preserve_rng_state:
    """Restores the state of the CPU generators at the end of the context."""

    def __enter__(self) -> None:
        self._before = save_states()

    def __exit__(self, *exc: object) -> None:
        exchange_states(self._before)


def random_state() -> dict[str, torch.Tensor]:
    """The state of all global generators, as tensors."""
    _, numbers, gauss = random.getstate()
    legacy: Any = numpy.random.get_state()
    _, keys, position, has_gauss, cached = legacy
    state = {
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python-gauss": torch.tensor(nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.from_numpy(keys.astype(numpy.int64)),
        "numpy-gauss": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Restore what `random_state` returned."""
    gauss = float(state["python-gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if isnan(gauss) else gauss))
    position, has_gauss, cached = state["numpy-gauss"].tolist()
    keys = state["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    torch.default_generator.set_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def positions() -> dict[str, Any]:
    """Where the global generators are in their sequences. An entry changes when numbers are drawn."""
    states = save_states()
    found: dict[str, Any] = {
        "torch": states[-1].numpy().tobytes(),
        "Python's random": states[:2],
        "numpy.random": str(states[2:-1]),
    }
    if torch.cuda.is_initialized():
        found["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def drawn_between(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The generators that have advanced."""
    return [name for name, position in after.items() if before.get(name) != position]
