"""Saves and restores the states of the global CPU generators of Python, NumPy and torch, around every batch.

All three are Mersenne Twisters: 624 words and a position. The official functions take 0.1 ms, because two of them
create Python objects for the words. Here words are copied as they lie in memory, and only after the position or one of
some words has changed. NumPy publishes the address of its words. Those of CPython and torch are searched, and compared
with what the official functions return. If they are not found, the official functions are used.
"""

from __future__ import annotations

import ctypes
import random
from _random import Random
from struct import pack, unpack_from
from typing import Any, NamedTuple

import numpy
import torch

_BYTES = 4 * 625  # of words and position
_MARK = 20  # bytes: a position and four words, which a draw leaves as they are with a probability of 2⁻¹²⁸
_python: Any = random.random.__self__  # type: ignore[attr-defined]
_numpy: Any = numpy.random.mtrand._rand
_torch = torch.default_generator
_TORCH_NORMAL = 24 + 8 * 624  # where the Gaussian number is in torch's state


class GeneratorStates(NamedTuple):
    """Gaussian numbers are computed in pairs, and a generator keeps the second one."""

    marks: tuple[bytes, bytes, bytes] | None
    keeps: bool  # whether NumPy or torch has such a number: returning it does not change the mark
    python: Any  # bytes, or what the official function returns
    python_gauss: float | None
    bits: Any  # NumPy's bit generator
    numpy: Any
    has_gauss: int
    gauss: float
    torch: torch.Tensor


class _GaussOnly:
    """In place of its bit generator, a RandomState reads and writes only its Gaussian number."""

    state: Any = {"bit_generator": "", "state": None}  # noqa: RUF012


class _Memory:
    """Views of the words and marks."""

    def __init__(self) -> None:
        self.bits, self.gauss_only = None, _GaussOnly()
        self.python: Any = None
        self.numpy: Any = None
        self.marks: tuple[Any, Any, Any] | None = None  # if all were found
        self._torch = _find_torch()
        *words, position = random.getstate()[1]
        if Random.__basicsize__ >= object.__basicsize__ + _BYTES:
            self.python = _view(id(_python) + object.__basicsize__, pack("i624I", position, *words))

    def find(self, bits: Any) -> None:
        """Find the words of NumPy."""
        self.bits, self.marks, state = bits, None, bits.state
        if state["bit_generator"] == "MT19937" and self.python is not None and self._torch is not None:
            key, position = state["state"]["key"].tolist(), state["state"]["pos"]
            self.numpy = _view(bits.ctypes.state_address, pack("624Ii", *key, position))
            if self.numpy is not None:
                python, ours = ctypes.addressof(self.python), ctypes.addressof(self.numpy) + _BYTES - _MARK
                self.marks = _bytes_at(python, _MARK), _bytes_at(ours, _MARK), self._torch


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


def save_states(known: GeneratorStates | None = None) -> GeneratorStates:
    """The present states: `known` itself if nothing was drawn since it was present."""
    memory, bits = _memory, _numpy._bit_generator
    if bits is not memory.bits:
        memory.find(bits)
    if memory.marks is None:
        return _by_official_functions(bits)
    python, ours, theirs = memory.marks
    marks = python.raw, ours.raw, theirs.raw
    if (
        known is not None
        and marks == known.marks
        and not known.keeps
        and bits is known.bits
        and _python.gauss_next == known.python_gauss
    ):
        return known
    _numpy._bit_generator = memory.gauss_only
    try:
        cached = _numpy.get_state(legacy=False)
    finally:
        _numpy._bit_generator = bits
    has_gauss, gauss, state = cached["has_gauss"], cached["gauss"], _torch.get_state()
    keeps = bool(has_gauss) or bool(state.numpy()[_TORCH_NORMAL:].any())
    python, ours = memory.python.raw, memory.numpy.raw
    return GeneratorStates(marks, keeps, python, _python.gauss_next, bits, ours, has_gauss, gauss, state)


def _by_official_functions(bits: Any) -> GeneratorStates:
    python, ours = random.getstate(), _numpy.get_state(legacy=False)
    gauss = ours["has_gauss"], ours["gauss"]
    return GeneratorStates(None, True, python, python[2], bits, ours, *gauss, _torch.get_state())


def exchange_states(states: GeneratorStates, known: GeneratorStates | None = None) -> GeneratorStates:
    """Restore `states`, and return those that they replace: `known` itself if nothing was drawn since."""
    replaced = save_states(known)
    if replaced is states:
        return replaced
    if states.bits is not replaced.bits:
        numpy.random.mtrand.set_bit_generator(states.bits)
        _memory.find(states.bits)
    if states.marks is None:
        random.setstate(states.python)
        _numpy.set_state(states.numpy)
    else:
        _memory.python.raw, _python.gauss_next, _memory.numpy.raw = states.python, states.python_gauss, states.numpy
        if states.has_gauss or replaced.has_gauss:
            _numpy._bit_generator = _memory.gauss_only
            try:
                gauss = {"has_gauss": states.has_gauss, "gauss": states.gauss}
                _numpy.set_state({"bit_generator": "", "state": None, **gauss})
            finally:
                _numpy._bit_generator = states.bits
    _torch.set_state(states.torch)
    return replaced


def same_states(some: GeneratorStates, others: GeneratorStates) -> bool:
    """Whether no generator has moved in between."""
    if some is others:
        return True
    if some.torch.numpy().tobytes() != others.torch.numpy().tobytes():
        return False
    if some.marks is None:
        return str(some[:-1]) == str(others[:-1])
    return some[:-1] == others[:-1]
