from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

import positions
from paceline.data.adopt import adopt
from reading import Numbers, samples_by_step, spec_for


@given(positions.data(), positions.starts())
@settings(max_examples=500, deadline=None, derandomize=True)
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
