from __future__ import annotations

import random

import numpy
import torch

from paceline.data.random_stream import RandomStream
from paceline.runtime.rng import preserve_rng_state, seed_cpu


def draw() -> tuple[float, ...]:
    return random.random(), random.gauss(), numpy.random.rand(), numpy.random.randn(), torch.rand(()).item()


def test_a_stream_continues_where_it_left_off_and_leaves_the_others_alone() -> None:
    with preserve_rng_state():
        seed_cpu(5)
        expected = [draw(), draw()]
        seed_cpu(9)
        outside = [draw(), draw()]
        stream = RandomStream(5)
        seed_cpu(9)
        with stream:
            inside = [draw()]
        found = [draw()]
        with stream:
            inside.append(draw())
        assert inside == expected and [*found, draw()] == outside
