"""How messages name ranks."""

from __future__ import annotations

from paceline.diagnose.rank_names import rank_names


def test_ranks_are_named_in_order_and_at_most_eight_of_them() -> None:
    assert rank_names([2]) == "rank 2"
    assert rank_names([3, 0, 1]) == "ranks 0, 1 and 3"
    assert rank_names(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 others"


def test_nodes_are_named_if_there_are_several() -> None:
    assert rank_names([0, 4], {0: 0, 4: 1}) == "ranks 0 (node 0) and 4 (node 1)"
