from __future__ import annotations

import random
from itertools import product

import numpy
import pytest
import torch

from paceline.runtime.rng import (
    derive_seed,
    preserve_rng_state,
    random_state,
    seed_cpu,
    seed_everything,
    set_random_state,
)


def draw() -> tuple[float, ...]:
    return random.random(), random.gauss(), numpy.random.rand(), numpy.random.randn(), torch.rand(()).item()


def test_a_seed_is_a_function_of_its_parts_in_order() -> None:
    seeds = {derive_seed(*parts) for parts in product(range(20), range(20))}
    assert len(seeds) == 400 and derive_seed(1, 2) != derive_seed(2, 1) and derive_seed(1) != derive_seed(1, 0)
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert derive_seed(0, 1, 2) == 15724360586833778554  # a checkpoint of another machine means the same samples


def test_neighbouring_seeds_differ_in_about_half_of_their_bits() -> None:
    flipped = [(derive_seed(3, step) ^ derive_seed(3, step + 1)).bit_count() for step in range(200)]
    assert min(flipped) > 12 and 30 < sum(flipped) / len(flipped) < 34


@pytest.mark.parametrize("seed", [seed_cpu, seed_everything])
def test_seeding_sets_every_generator(seed: object) -> None:
    with preserve_rng_state():
        seed(2**40 + 7)  # type: ignore[operator]
        first = draw()
        seed(2**40 + 7)  # type: ignore[operator]
        assert draw() == first
        seed(2**40 + 8)  # type: ignore[operator]
        assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_saved_random_state_continues_with_the_same_numbers() -> None:
    with preserve_rng_state():
        seed_cpu(1)
        draw()  # leaves a second Gaussian number cached in Python's and numpy's generators
        state = {name: tensor.clone() for name, tensor in random_state().items()}
        expected = [draw(), draw()]
        seed_cpu(2)
        set_random_state(state)
        assert [draw(), draw()] == expected
