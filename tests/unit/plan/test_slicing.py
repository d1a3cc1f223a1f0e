from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.slicing import SliceSum, fixed_slices, slices_of, spans_of


@given(batch=st.integers(1, 200), missing=st.integers(0, 199), groups=st.integers(1, 12), ranks=st.integers(1, 17))
@settings(max_examples=300, deadline=None)
def test_shares_of_all_ranks_cover_every_sample_once(batch: int, missing: int, groups: int, ranks: int) -> None:
    groups = min(groups, batch)
    samples = max(1, batch - missing)
    by_rank = [list(slices_of(samples, batch, groups, rank, ranks)) for rank in range(ranks)]
    covered = sorted(i for own in by_rank for share in own for i in range(share.start, share.stop))
    assert covered == list(range(samples))
    # All ranks have the same groups, none of them empty, and sizes differ by at most one.
    first = [(s.group_start, s.group_stop) for s in by_rank[0]]
    assert all([(s.group_start, s.group_stop) for s in own] == first for own in by_rank)
    assert all(stop > start for start, stop in first)
    assert [share.last for share in by_rank[0]] == [False] * (len(first) - 1) + [True]
    for group in range(len(first)):
        sizes = [own[group].samples for own in by_rank]
        assert max(sizes) - min(sizes) <= 1


def test_a_group_is_the_same_samples_on_any_number_of_ranks() -> None:
    groups = {ranks: [(s.group_start, s.group_stop) for s in slices_of(10, 10, 3, 0, ranks)] for ranks in (1, 2, 3, 4)}
    assert len({tuple(cut) for cut in groups.values()}) == 1


def test_a_short_batch_keeps_the_size_of_its_micro_batches() -> None:
    sizes = [share.samples for share in slices_of(3, 12, 4, 0, 1)]
    assert sizes == [3]


@given(samples=st.integers(1, 100), groups=st.integers(1, 6), ranks=st.sampled_from([1, 2, 3, 4, 6]))
@settings(max_examples=100, deadline=None)
def test_fixed_slices_are_the_same_on_any_number_of_ranks(samples: int, groups: int, ranks: int) -> None:
    slices = groups * ranks
    alone = [(each.start, each.stop, each.rows) for each in fixed_slices(samples, slices, 0, 1)]
    shared = [list(fixed_slices(samples, slices, rank, ranks)) for rank in range(ranks)]
    assert [(each.start, each.stop, each.rows) for own in shared for each in own] == alone
    assert [index for start, stop, _ in alone for index in range(start, stop)] == list(range(samples))
    assert all(0 <= start < stop <= samples for _, _, (start, stop) in alone)
    assert all([each.last for each in own] == [False] * (groups - 1) + [True] for own in shared)


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
