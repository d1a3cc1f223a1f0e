from __future__ import annotations

from typing import Any

import pytest

from paceline.plan.slice_tree import SliceSum, spans_of


def pair(left: Any, right: Any) -> tuple[Any, Any]:
    return left, right


def order_on(ranks: int, slices: int) -> Any:
    """The order of additions, as nested pairs: first on each rank, then of what the ranks have left."""
    total, own = SliceSum[Any](slices, pair), slices // ranks
    for rank in range(ranks):
        local = SliceSum[Any](slices, pair)
        for number in range(rank * own, (rank + 1) * own):
            local.push((number, number + 1), number)
        assert [span for span, _ in local.parts] == spans_of(slices, rank * own, (rank + 1) * own)
        for span, value in local.parts:
            total.push(span, value)
    [(span, value)] = total.parts
    assert span == (0, slices)
    return value


@pytest.mark.parametrize("slices", [1, 2, 5, 8, 9, 12, 24, 30])
def test_the_order_does_not_depend_on_the_number_of_ranks(slices: int) -> None:
    orders = {ranks: order_on(ranks, slices) for ranks in range(1, slices + 1) if slices % ranks == 0}
    assert all(order == orders[1] for order in orders.values()), orders


def test_twelve_slices_are_added_in_halves() -> None:
    first, second = order_on(3, 12)
    assert first == (((0, 1), 2), ((3, 4), 5))
    assert second == (((6, 7), 8), ((9, 10), 11))


@pytest.mark.parametrize(("ranks", "sums"), [(1, 1), (2, 2), (3, 7), (4, 4), (6, 10), (12, 12)])
def test_ranks_add_what_they_can_before_they_exchange_anything(ranks: int, sums: int) -> None:
    own = 12 // ranks
    assert sum(len(spans_of(12, rank * own, (rank + 1) * own)) for rank in range(ranks)) == sums


def test_one_rank_holds_few_sums_at_a_time() -> None:
    total = SliceSum[int](12, int.__add__)
    held = []
    for number in range(12):
        held.append(len(total.parts) + 1)
        total.push((number, number + 1), number)
    assert max(held) == 4
    assert total.parts == [((0, 12), 66)]
