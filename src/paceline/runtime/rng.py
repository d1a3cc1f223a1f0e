"""Random number generators: derived seeds, such as one per (seed, epoch, sample), and the global state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import isnan, nan
from typing import Any

import numpy
import torch

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


class preserve_rng_state:
    """Restores the state of the CPU generators at the end of the context."""

    def __enter__(self) -> None:
        self._before = _state()

    def __exit__(self, *exc: object) -> None:
        _set_state(self._before)


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
    legacy: Any = numpy.random.get_state()
    found: dict[str, Any] = {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "Python's random": random.getstate(),
        "numpy.random": (legacy[1].tobytes(), *legacy[2:]),
    }
    if torch.cuda.is_initialized():
        found["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


def drawn_between(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The generators that have advanced."""
    return [name for name, position in after.items() if before.get(name) != position]


def _state() -> tuple[Any, Any, Any]:
    return random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()


def _set_state(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.default_generator.set_state(state[2])
