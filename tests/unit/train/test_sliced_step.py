from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline import dist
from paceline.plan.slicing import SliceSum
from paceline.train import sliced_step
from paceline.train.sliced_step import Gradients, SliceExchange, add_gradients
from worlds import ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64)


def gradients_of(number: int) -> Gradients:
    """Those of a slice: of several sizes, dtypes and orders of dims, over many orders of magnitude."""
    generator = torch.Generator().manual_seed(number)
    shapes = ((7, 3), (2, 5), (1,), (4, 4), (3,))
    values = [torch.randn(shape, generator=generator) * 10.0 ** (number % 5) for shape in shapes]
    gradients: Gradients = [value.to(dtype) for value, dtype in zip(values, (*DTYPES, torch.float32), strict=True)]
    gradients[1] = gradients[1].t()
    return gradients


def sum_of(slices: int, first: int, stop: int) -> SliceSum[Gradients]:
    total = SliceSum[Gradients](slices, add_gradients)
    for number in range(first, stop):
        total.push((number, number + 1), gradients_of(number))
    return total


def check(slices: int) -> Callable[[], None]:
    def body() -> None:
        [(_, expected)] = sum_of(slices, 0, slices).parts
        own = slices // dist.world()
        sums: list[list[Tensor]] = [
            value for _, value in sum_of(slices, dist.rank() * own, dist.rank() * own + own).parts
        ]
        places = [gradient.data_ptr() for gradient in sums[0]]
        SliceExchange(slices, dist.world()).add_up(sums)
        for gradient, other in zip(sums[0], expected, strict=True):
            assert torch.equal(gradient, other), (gradient, other)
            assert gradient.stride() == other.stride()
        assert [gradient.data_ptr() for gradient in sums[0]] == places

    return body


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_sum_of_all_ranks_has_the_bits_of_one(number: int) -> None:
    ranks(number)(check(12))()


def test_large_gradients_are_exchanged_in_several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_step, "_BUCKET", 8)
    ranks(3)(check(6))()


def test_a_gradient_that_does_not_exist_counts_as_zeros() -> None:
    zero, some = torch.tensor([-0.0]), torch.tensor([2.0])
    added = add_gradients([zero.clone(), None, None, some.clone()], [None, zero.clone(), None, some.clone()])
    assert [None if each is None else (each.item(), bool(each.signbit())) for each in added] == [
        (0.0, False), (0.0, False), None, (4.0, False),
    ]  # fmt: skip
