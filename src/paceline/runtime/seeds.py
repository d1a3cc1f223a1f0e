"""Random state from coordinates: a seed for (seed, epoch, sample) or (seed, step, group) by arithmetic alone."""

from __future__ import annotations

import random

import numpy
import torch

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """64 well-spread bits from whole numbers, the same on every machine (splitmix64's finalizer, chained)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's global generators, on the CPU and every GPU."""
    seed_cpu(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_cpu(seed: int) -> None:
    """The generators that data code draws from. `default_generator` skips torch.manual_seed's walk over devices."""
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


class KeptRandomState:
    """The CPU generators as they were, given back at the end."""

    def __enter__(self) -> None:
        self._python = random.getstate()
        self._numpy = numpy.random.get_state()
        self._torch = torch.default_generator.get_state()

    def __exit__(self, *exc: object) -> None:
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)
