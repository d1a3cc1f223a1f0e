"""Samples under generators of their own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.data.seeded_dataset import SeededBatches
from paceline.errors import DataError
from paceline.runtime.rng import preserve_rng_state, seed_cpu
from reading import Numbers, micros, spec_for

DRAWS: dict[str, Callable[[], float]] = {
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "numpy": numpy.random.randn,
    "torch": lambda: torch.randn(1).item(),
}


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with preserve_rng_state():
        yield


class Forgetful(Dataset[Any]):
    def __getitem__(self, index: int) -> None:
        pass


def test_a_sample_that_is_none_is_named_with_the_line_of_getitem() -> None:
    with pytest.raises(DataError, match=r"Forgetful\.__getitem__\(7\) \(.*test_seeded_dataset\.py:34\)") as caught:
        SeededBatches(Forgetful(), 0, list, own_collate=False).__getitems__((0, [7], None))
    assert caught.value.code == "data.no-sample"
    assert SeededBatches(Forgetful(), 0, list, own_collate=True).__getitems__((0, [7], None)) == [None]


class Late(Numbers):
    """Draws for its last samples only."""

    def __init__(self, draw: Callable[[], float], first: int = 75) -> None:
        super().__init__(100)
        self.draw, self.first, self.read = draw, first, Counter[int]()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read[index] += 1
        return torch.tensor([index, self.draw() if index >= self.first else 0.0], dtype=torch.float64)


def samples(data: Any, seed: int = 0, ranks: int = 1, first: int = 0, **changes: Any) -> dict[tuple[int, int], float]:
    """What each sample is, by epoch and index."""
    seed_cpu(seed)
    rows = [
        (micro.epoch, *row)
        for rank in range(ranks)
        for micro in micros(data, spec_for(10, rank, ranks, shuffle=False, **changes), first, epochs=2)
        for row in micro.batch.tolist()
    ]
    return {(epoch, int(index)): value for epoch, index, value in rows}


@pytest.mark.parametrize("generator", DRAWS)
def test_a_dataset_that_draws_late_gives_the_same_samples_everywhere(generator: str) -> None:
    draw = DRAWS[generator]
    expected = samples(data := Late(draw))
    always = Late(draw)
    always.draws_randomness = True  # type: ignore[attr-defined]
    assert samples(always, seed=1) == expected == samples(Late(draw), seed=2, ranks=2)
    assert samples(Late(draw), seed=3, first=12) == {key: expected[key] for key in expected if key >= (1, 20)}
    assert {value for (_, index), value in expected.items() if index < 75} == {0.0}
    assert len(set(expected.values())) == 1 + 2 * 25
    twice = [index for index, count in data.read.items() if count > 2]
    assert twice == list(range(70, 80))  # of two epochs, the first batch that draws
    seed_cpu(5)
    numbers = [draw(), draw(), draw()]
    assert [samples(Late(draw), seed=5) and draw(), draw(), draw()] == numbers


def test_samples_of_workers_are_those_of_this_process() -> None:
    def draw() -> float:
        return sum(each() for each in DRAWS.values())

    assert samples(Late(draw)) == samples(Late(draw), workers=1)


def test_a_collate_function_that_draws_late_is_seeded_by_its_batch() -> None:
    def collate(items: list[torch.Tensor]) -> torch.Tensor:
        noise = torch.rand(()).item() if int(items[0][0]) >= 50 else 0.0
        return torch.stack(items) + torch.tensor([0.0, noise])

    def loader(first: int) -> DataLoader[Any]:
        return DataLoader(Late(random.random, first), batch_size=10, collate_fn=collate)

    assert samples(loader(200), seed=1) == samples(loader(200), seed=2)
    assert samples(loader(75), seed=1) == samples(loader(75), seed=2)


def test_an_error_that_depends_on_a_draw_is_that_of_the_seeded_sample() -> None:
    class Picky(Late):
        def __getitem__(self, index: int) -> torch.Tensor:
            sample = super().__getitem__(index)
            if sample[1] == self.forbidden:
                raise ValueError("not this one")
            return sample

    data = Picky(random.random)
    data.forbidden = -1.0  # type: ignore[attr-defined]
    expected = samples(data)
    seed_cpu(7)
    data = Picky(random.random)
    data.forbidden = random.random()  # type: ignore[attr-defined]
    assert samples(data, seed=7) == expected  # the number that training would draw next
    data.forbidden = expected[0, 80]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="not this one"):
        samples(data)
