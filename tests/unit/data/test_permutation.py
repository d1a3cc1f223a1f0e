from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.permutation import Permutation
from paceline.data.sample_order import FormulaOrder


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_used_exactly_once(n: int, seed: int, epoch: int) -> None:
    samples = Permutation(n, seed, epoch)(np.arange(n))
    assert np.array_equal(np.sort(samples), np.arange(n))


def test_a_position_is_the_same_whether_asked_alone_or_in_a_block() -> None:
    permutation = Permutation(1000, 3, 4)
    whole = permutation(np.arange(1000))
    assert all(permutation(np.array([position]))[0] == whole[position] for position in (0, 1, 499, 999))


def test_positions_among_a_billion_samples_do_not_repeat() -> None:
    n = 10**9
    permutation = Permutation(n, 0, 0)
    samples = np.concatenate([permutation(np.arange(start, start + 100_000)) for start in (0, n // 2, n - 100_000)])
    assert len(np.unique(samples)) == 300_000
    assert samples.min() >= 0 and samples.max() < n
    # Uniform: the mean of 300,000 draws lies within 5 deviations of the middle.
    assert abs(samples.mean() / n - 0.5) < 5 * (1 / 12) ** 0.5 / 300_000**0.5


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = [tuple(Permutation(100, seed, epoch)(np.arange(100))) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6


@pytest.mark.parametrize("n", [2, 3, 5, 12, 97])
def test_every_sample_is_equally_likely_at_every_position(n: int) -> None:
    epochs = 4000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), Permutation(n, 11, epoch)(np.arange(n))] += 1
    expected = epochs / n
    # Chi-square over n × n cells with (n - 1)² degrees of freedom; the bound is 6 deviations out.
    freedom = (n - 1) ** 2
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * (2 * freedom) ** 0.5 + 6


def test_neighbours_in_the_data_are_not_neighbours_in_the_order() -> None:
    samples = Permutation(10_000, 5, 0)(np.arange(10_000))
    assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(samples)) == 1).mean() < 0.002


@pytest.mark.parametrize("batch", [1, 7, 64, 5000])
def test_an_epoch_may_be_resumed_at_any_step(batch: int) -> None:
    order = FormulaOrder(9001, batch, seed=2, shuffle=True)
    whole = list(order.epoch(3, 0))
    assert len(whole) == order.lengths.per_epoch
    assert sorted(index for step in whole for index in step) == list(range(9001))
    for first in (0, 1, len(whole) // 2, len(whole) - 1):
        assert list(order.epoch(3, first)) == whole[first:]


def test_drop_last_drops_the_short_batch_only() -> None:
    order = FormulaOrder(10, 4, seed=0, shuffle=False, drop_last=True)
    assert list(order.epoch(0, 0)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
