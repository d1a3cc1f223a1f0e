"""Saves and restores the states of the global CPU generators of Python, NumPy and torch, around every batch.

All three are Mersenne Twisters: 624 words and a position. The official functions take 0.1 ms, because two of them
create Python objects for the words. Here words are copied as they lie in memory, and only after the position or one of
some words has changed. NumPy publishes the address of its words. Those of CPython and torch are searched, and compared
with what the official functions return. If they are not found, the official functions are used.

A `RandomStream` gives a source of data random numbers from the global generators, apart from those of training.
"""

from __future__ import annotations

import ctypes
import random
from _random import Random
from collections.abc import Callable, Iterator
from functools import partial
from struct import pack, unpack_from
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch.utils.data._utils.worker import _generate_state

from paceline.runtime.rng import seed_cpu

_BYTES = 4 * 625  # of words and position
_MARK = 20  # bytes: a position and four words, which a draw leaves as they are with a probability of 2⁻¹²⁸
_python: Any = random.random.__self__  # type: ignore[attr-defined]
_numpy: Any = numpy.random.mtrand._rand
_torch = torch.default_generator
_TORCH_NORMAL = 24 + 8 * 624  # where the Gaussian number is in torch's state


class GeneratorStates(NamedTuple):
    """Gaussian numbers are computed in pairs, and a generator keeps the second one for the next call."""

    marks: tuple[Any, ...]  # NumPy's bit generator, Python's Gaussian number, and the marks of all generators
    keeps: bool  # whether NumPy or torch keeps such a number: it is returned without a change of the mark
    python: Any  # words, or what the official function returns
    numpy: Any
    gauss: dict[str, Any]  # NumPy's
    torch: torch.Tensor


class _GaussOnly:
    """In place of its bit generator, a RandomState reads and writes only its Gaussian number."""

    @property
    def state(self) -> dict[str, Any]:
        return {"bit_generator": "", "state": None}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        pass


class _Memory:
    """Views of the words and marks."""

    def __init__(self) -> None:
        self.bits: Any = None
        self.python: Any = None
        self.marks: list[Any] = []  # always the same list
        self.gauss_only, self._torch = _GaussOnly(), _find_torch()
        *words, position = random.getstate()[1]
        if Random.__basicsize__ >= object.__basicsize__ + _BYTES:
            self.python = _view(id(_python) + object.__basicsize__, pack("i624I", position, *words))

    def find(self, bits: Any) -> None:
        """Find the words of NumPy. There are no marks unless the words of all generators are found."""
        self.bits, state = bits, bits.state
        self.marks.clear()
        if state["bit_generator"] == "MT19937" and self.python is not None and self._torch is not None:
            key, position = state["state"]["key"].tolist(), state["state"]["pos"]
            self.numpy = _view(bits.ctypes.state_address, pack("624Ii", *key, position))
            if self.numpy is not None:
                starts = ctypes.addressof(self.python), ctypes.addressof(self.numpy) + _BYTES - _MARK
                self.marks += [*(_bytes_at(start, _MARK) for start in starts), self._torch]


def _find_torch() -> Any:
    """Position and words are near the start of torch's object."""
    expected = pack("625I", *unpack_from("625Q", _torch.get_state().numpy().tobytes(), 16))
    address: int = getattr(_torch, "_cdata", 0)
    offset = _bytes_at(address, 256).raw.find(expected[:64]) if address else -1
    return _bytes_at(address + offset, _MARK) if offset >= 0 and _view(address + offset, expected) else None


def _bytes_at(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


def _view(address: int, expected: bytes) -> Any:
    found = _bytes_at(address, _BYTES)
    return found if found.raw == expected else None


_memory = _Memory()


# The marks of Python's, NumPy's and torch's CPU generators, in this order: they change when one of them is drawn from,
# unless what is returned is the second Gaussian number. Empty if they aren't known, and before `find_marks`. A function
# of C, because a step with a Python call more is a slower step.
marks_now: Callable[[], bytes] = partial(b"".join, _memory.marks)


def find_marks() -> None:
    if _numpy._bit_generator is not _memory.bits:
        _memory.find(_numpy._bit_generator)


def split_marks(marks: bytes) -> list[bytes]:
    return [marks[start : start + _MARK] for start in range(0, len(marks), _MARK)]


def _gauss_only(function: Any, *args: Any, **options: Any) -> Any:
    bits, _numpy._bit_generator = _numpy._bit_generator, _memory.gauss_only
    try:
        return function(*args, **options)
    finally:
        _numpy._bit_generator = bits


def save_states(known: GeneratorStates | None = None) -> GeneratorStates:
    """The present states: `known` itself if nothing was drawn since it was present."""
    memory, bits = _memory, _numpy._bit_generator
    if bits is not memory.bits:
        memory.find(bits)
    if not memory.marks:
        return GeneratorStates((bits,), True, random.getstate(), _numpy.get_state(legacy=False), {}, _torch.get_state())
    python, ours, theirs = memory.marks
    marks = bits, _python.gauss_next, python.raw, ours.raw, theirs.raw
    if known is not None and marks == known.marks and not known.keeps:
        return known
    gauss, state = _gauss_only(_numpy.get_state, legacy=False), _torch.get_state()
    keeps = bool(gauss["has_gauss"] or state.numpy()[_TORCH_NORMAL:].any())
    return GeneratorStates(marks, keeps, memory.python.raw, memory.numpy.raw, gauss, state)


def exchange_states(states: GeneratorStates, known: GeneratorStates | None = None) -> GeneratorStates:
    """Restore `states`, and return those that they replace: `known` itself if nothing was drawn since."""
    replaced, memory, marks = save_states(known), _memory, states.marks
    if marks[0] is not replaced.marks[0]:
        numpy.random.mtrand.set_bit_generator(marks[0])
        memory.find(marks[0])
    if len(marks) == 1:
        random.setstate(states.python)
        _numpy.set_state(states.numpy)
    else:
        memory.python.raw, _python.gauss_next, memory.numpy.raw = states.python, marks[1], states.numpy
        if states.keeps or replaced.keeps:
            _gauss_only(_numpy.set_state, states.gauss)
    _torch.set_state(states.torch)
    return replaced


def same_states(some: GeneratorStates, others: GeneratorStates) -> bool:
    """Whether no generator has moved in between."""
    if some is others:
        return True
    same_torch = some.torch.numpy().tobytes() == others.torch.numpy().tobytes()
    return same_torch and str(some[:-1]) == str(others[:-1])


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
