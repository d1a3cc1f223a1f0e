"""Saves and restores the states of the global CPU generators of Python, NumPy and torch, in about 2 µs each.

`random.getstate` and `numpy.random.get_state` create a Python object for each of 624 words, which takes 10 and 50 µs.
Here the words are copied as they lie in memory: NumPy publishes their address, and in CPython they follow the header of
the generator. They are first compared with what the official functions return, which are used where they differ: with
another interpreter, or another bit generator.
"""

from __future__ import annotations

import ctypes
import random
from _random import Random
from struct import pack
from typing import Any

import numpy
import torch

_BYTES = 4 * 625  # words and a position
_python: Any = random.random.__self__  # type: ignore[attr-defined]
_numpy: Any = numpy.random.mtrand._rand


# Python's words and its cached Gaussian number (they are drawn in pairs); NumPy's bit generator, its words, whether it
# has a cached Gaussian number, and this number; torch's state. Instead of words: what the official functions return.
States = tuple[Any, float | None, Any, Any, int, float, torch.Tensor]


class _GaussOnly:
    """In place of its bit generator, a RandomState reads and writes only its cached Gaussian number."""

    state: Any = {"bit_generator": "", "state": None}  # noqa: RUF012


class _Words:
    """Views of the words in memory; None where they were not found."""

    def __init__(self) -> None:
        self.gauss_only, self.bits, self.numpy, self.python = _GaussOnly(), None, None, None
        if Random.__basicsize__ >= object.__basicsize__ + _BYTES:
            *words, position = random.getstate()[1]
            self.python = _view(id(_python) + object.__basicsize__, pack("i624I", position, *words))

    def find(self, bits: Any) -> None:
        self.bits, self.numpy, state = bits, None, bits.state
        if state["bit_generator"] == "MT19937":
            words = pack("624Ii", *state["state"]["key"].tolist(), state["state"]["pos"])
            self.numpy = _view(bits.ctypes.state_address, words)


def _view(address: int, expected: bytes) -> Any:
    words = (ctypes.c_char * _BYTES).from_address(address)
    return words if words.raw == expected else None


_words: Any = _Words()


def save_states() -> States:
    words, bits = _words, _numpy._bit_generator
    if bits is not words.bits:
        words.find(bits)
    if words.numpy is not None:
        _numpy._bit_generator = words.gauss_only
    try:
        state = _numpy.get_state(legacy=False)
    finally:
        _numpy._bit_generator = bits
    return (
        random.getstate() if words.python is None else words.python.raw,
        _python.gauss_next,
        bits,
        state if words.numpy is None else words.numpy.raw,
        state["has_gauss"],
        state["gauss"],
        torch.default_generator.get_state(),
    )


def exchange_states(states: States) -> States:
    """Restore `states`, and return those that they replace."""
    words, (python, python_gauss, bits, state, has_gauss, gauss, torch_state) = _words, states
    replaced = save_states()
    if words.python is None:
        random.setstate(python)
    else:
        words.python.raw, _python.gauss_next = python, python_gauss
    if bits is not replaced[2]:
        numpy.random.mtrand.set_bit_generator(bits)
        words.find(bits)
    if words.numpy is None:
        _numpy.set_state(state)
    else:
        words.numpy.raw = state
        if has_gauss or replaced[4]:
            _numpy._bit_generator = words.gauss_only
            try:
                _numpy.set_state({"bit_generator": "", "state": None, "has_gauss": has_gauss, "gauss": gauss})
            finally:
                _numpy._bit_generator = bits
    torch.default_generator.set_state(torch_state)
    return replaced


def same_states(some: States, others: States) -> bool:
    """Whether no generator has moved in between."""
    if type(some[3]) is not bytes:
        some, others = ((*each[:3], str(each[3]), *each[4:]) for each in (some, others))
    return some[:-1] == others[:-1] and some[-1].numpy().tobytes() == others[-1].numpy().tobytes()
