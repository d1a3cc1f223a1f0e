"""Random number generators: derived seeds, such as one per (seed, epoch, sample), and the global state.

Dropout and noise are computed from counts of calls, which are not part of the state of torch's generators. While a step
runs, whoever recomputes a forward restores them: torch's activation checkpointing in both variants, and what is built
on it (`checkpoint_sequential`, `gradient_checkpointing_enable()` of transformers). Implementations of others, such as
DeepSpeed's and reversible layers, restore the state of torch's generator, and in a backward the counts with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isnan, nan
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.utils import checkpoint

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


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restores the state of the CPU generators at the end of the context."""
    python, legacy, own = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(legacy)
        torch.default_generator.set_state(own)


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


class Replacements:
    """Attributes of torch that are replaced while this is entered."""

    def __init__(self) -> None:
        self._attributes: list[tuple[Any, str, Any, Any]] = []
        self._depth = 0

    def add(self, owner: Any, name: str, value: Any) -> None:
        # None: inherited.
        self._attributes.append((owner, name, vars(owner).get(name), value))

    def __enter__(self) -> None:
        self._depth += 1  # the loops of two Trainers may be nested
        if self._depth == 1:
            for owner, name, _, value in self._attributes:
                setattr(owner, name, value)

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            for owner, name, original, _ in self._attributes:
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


class Counts(Protocol):
    """Where a forward is in its random numbers. Entered, what follows repeats them."""

    def copy(self) -> Counts: ...
    def resume(self, other: Any) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: object) -> None: ...


class _Repeated:
    """A function that a checkpoint runs again. `ran`: whether the first run is not made through this object."""

    def __init__(self, function: Callable[..., Any], counts: Counts, *, ran: bool) -> None:
        self._function, self._counts, self._ran = function, counts, ran

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ran:
            self._ran = True
            return self._function(*args, **kwargs)
        with self._counts.copy():
            return self._function(*args, **kwargs)


def rewound(current: Callable[[], Counts | None]) -> Replacements:
    """Of what recomputes forwards. `current` returns the counts in use, if any."""
    frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    get_state, set_state = torch.get_rng_state, torch.set_rng_state

    def repeatable(run: Callable[..., Any], *, ran: bool) -> Callable[..., Any]:
        counts = current()
        return run if counts is None else _Repeated(run, counts.copy(), ran=ran)

    class Reentrant:
        @staticmethod
        def apply(run: Callable[..., Any], *args: Any) -> Any:
            return function.apply(repeatable(run, ran=False), *args)

    def get_rng_state() -> Tensor:
        state, counts = get_state(), current()
        if counts is not None:
            state.paceline_counts = counts.copy()  # type: ignore[attr-defined]
        return state

    def set_rng_state(new_state: Tensor) -> None:
        set_state(new_state)
        counts, saved = current(), getattr(new_state, "paceline_counts", None)
        if counts is not None and saved is not None and torch._C._current_graph_task_id() != -1:
            counts.resume(saved)

    replaced = Replacements()
    replaced.add(checkpoint, "_CheckpointFrame", lambda run, *args: frame(repeatable(run, ran=True), *args))
    replaced.add(checkpoint, "CheckpointFunction", Reentrant)
    replaced.add(torch, "get_rng_state", get_rng_state)
    replaced.add(torch, "set_rng_state", set_rng_state)
    return replaced
