"""The time of a step on several ranks."""

from __future__ import annotations

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.scaling_model import exposed_after, free_cores, scaled


def test_buckets_are_reduced_one_after_the_other_from_when_they_are_ready() -> None:
    assert exposed_after([5.0, 0.0], [2.0, 2.0]) == 2.0  # the first is done before the second is ready
    assert exposed_after([1.0, 0.0], [2.0, 2.0]) == 3.0  # the second waits for the first
    assert exposed_after([9.0, 5.0], [2.0, 2.0]) == 0.0  # all done before the last gradient
    assert exposed_after([], []) == 0.0


def test_communication_without_cores_of_its_own_does_not_overlap() -> None:
    assert exposed_after([9.0, 5.0], [2.0, 2.0], overlap=0.0) == 4.0
    assert exposed_after([5.0, 0.0], [2.0, 2.0], overlap=0.5) == 3.0
    assert [free_cores(16, ranks) for ranks in (1, 8, 10, 16, 32)] == [1.0, 1.0, pytest.approx(0.6), 0.0, 0.0]


@pytest.mark.parametrize(("mode", "ranks", "first", "batch"), [
    ("strong", 4, 1, 32), ("weak", 4, 1, 128), ("weak", 4, 2, 64), ("strong", 4, 2, 32),
])  # fmt: skip
def test_strong_scaling_keeps_the_batch_and_weak_scaling_that_of_each_rank(
    mode: str, ranks: int, first: int, batch: int
) -> None:
    assert scaled(Config(batch=32), mode, ranks, first).batch == batch


def test_a_batch_per_rank_becomes_a_batch() -> None:
    recipe = Config(micro_batch=4, accumulate=2)
    strong, weak = scaled(recipe, "strong", 4, 1), scaled(recipe, "weak", 4, 1)
    assert (strong.batch, strong.micro_batch, strong.accumulate) == (8, 4, None)
    assert (weak.batch, weak.micro_batch) == (32, 4)
    assert scaled(Config(batch_per_rank=8), "strong", 4, 2).batch == 16


def test_a_batch_smaller_than_the_ranks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="batch-smaller-than-ranks"):
        scaled(Config(batch=2), "strong", 4, 1)
    assert scaled(Config(batch=2), "weak", 4, 1).batch == 8
