from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.slicing import fixed_slices, slices_of


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
