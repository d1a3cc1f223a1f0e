from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, WeightedRandomSampler

import positions
from paceline.data.adopt import adopt
from paceline.data.sample_order import FormulaOrder, Permutation
from reading import Numbers, samples_by_step, spec_for
from samples import sample


@given(positions.data(), positions.starts())
@settings(max_examples=sample(200, 500), deadline=None, derandomize=True)
def test_a_step_has_the_same_samples_whatever_ranks_read_the_steps_before_it(
    data: positions.Data, starts: list[positions.Start]
) -> None:
    positions.check(data, starts)


def test_a_custom_sampler_yields_the_same_indices_on_every_rank() -> None:
    def loader() -> DataLoader[torch.Tensor]:
        sampler = WeightedRandomSampler([1.0] * 10 + [0.0] * 10, num_samples=16)
        return DataLoader(Numbers(20), batch_size=6, sampler=sampler)

    alone = samples_by_step(loader(), 1, batch=6, epochs=2)
    assert [sorted(step) for step in samples_by_step(loader(), 3, batch=6, epochs=2)] == [sorted(s) for s in alone]
    assert [len(step) for step in alone] == [6, 6, 4, 6, 6, 4]
    assert max(x for step in alone for x in step) < 10
    assert alone[:3] != alone[3:]


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_a_batch_sampler_may_yield_arrays(kind: Any) -> None:
    class Arrays(Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield kind([0, 2, 4])
            yield kind([6])

    loader = DataLoader(Numbers(10), batch_sampler=Arrays())
    assert [sorted(step) for step in samples_by_step(loader, 2, batch=3)] == [[0, 2, 4], [6]]


def test_an_infinite_sampler_is_read_lazily() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return cycle(range(20))

    loader = DataLoader(Numbers(20), batch_size=6, sampler=Endless())
    stream = adopt(loader, spec_for(6), lambda text: None).micros(0, 1)
    assert [next(stream).batch.tolist() for _ in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_a_batch_samplers_lists_are_global_batches() -> None:
    class Evens(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield [0, 2, 4]
            yield [6, 8]

        def __len__(self) -> int:
            return 2

    loader = DataLoader(Numbers(10), batch_sampler=Evens(SequentialSampler(Numbers(10)), 3, False))
    assert [sorted(step) for step in samples_by_step(loader, 2, batch=3)] == [[0, 2, 4], [6, 8]]


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


@pytest.mark.parametrize("n", [3, 97, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 5, 12))])
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
