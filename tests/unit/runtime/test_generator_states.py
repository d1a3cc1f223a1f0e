"""Saved states of the global generators, compared with what the official functions return."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from paceline.runtime import generator_states
from paceline.runtime.generator_states import exchange_states, same_states, save_states

DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.seed": lambda: random.seed(7),
    "numpy": numpy.random.rand,
    "numpy.randn": numpy.random.randn,
    "numpy.seed": lambda: numpy.random.seed(7),
    "torch": lambda: torch.rand(1),
    "torch.randn": lambda: torch.randn(1),
    "torch.seed": lambda: torch.manual_seed(7),
}


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before = save_states()
    yield
    generator_states._memory.bits = None  # search again
    exchange_states(before)


def official() -> str:
    with numpy.printoptions(threshold=10_000):
        return str((random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist()))


@pytest.fixture(params=["words", "official functions"])
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the words are not found in memory."""
    if request.param == "official functions":
        monkeypatch.setattr(generator_states._memory, "python", None)
        generator_states._memory.find(numpy.random.mtrand.get_bit_generator())


def test_the_words_of_all_three_generators_are_found() -> None:
    assert len(save_states().marks) > 1


@pytest.mark.parametrize("cached", [False, True], ids=["", "with a cached Gaussian number"])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.usefixtures("words")
def test_every_draw_is_seen_and_undone(draw: str, cached: bool) -> None:
    for _ in range(cached):
        random.gauss(0, 1), numpy.random.randn(), torch.randn(1)
    saved, before = save_states(), official()
    assert same_states(saved, save_states()) and same_states(saved, save_states(saved))
    DRAWS[draw]()
    drawn, after = save_states(saved), official()
    assert not same_states(saved, drawn) and after != before
    replaced = exchange_states(saved)
    assert official() == before and same_states(replaced, drawn)
    for states, expected in ((replaced, after), (saved, before)) * 2:
        exchange_states(states)
        assert official() == expected


@pytest.mark.usefixtures("words")
def test_a_bit_generator_that_was_installed_meanwhile_is_replaced() -> None:
    saved, before = save_states(), official()
    numpy.random.mtrand.set_bit_generator(numpy.random.PCG64(3))
    numpy.random.randn()
    expected = save_states()
    numbers = numpy.random.randn(3).tolist()
    exchange_states(saved)
    assert official() == before
    exchange_states(expected)
    assert numpy.random.randn(3).tolist() == numbers
    exchange_states(saved)
    assert official() == before
