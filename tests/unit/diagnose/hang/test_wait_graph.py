from __future__ import annotations

import pytest

from paceline.diagnose.hang.wait_graph import blamed, cycle, stuck


@pytest.mark.parametrize(
    ("awaits", "ended", "expected"),
    [
        ({0: {1}}, [], set()),  # rank 1 runs
        ({0: {1}, 1: {0}}, [], {0, 1}),
        ({0: {1}, 1: set()}, [], set()),
        ({0: {1}}, [1], {0, 1}),
        ({0: set()}, [1], {1}),
        ({0: {1}, 1: {2}, 2: {0}}, [], {0, 1, 2}),
        ({0: {1}, 1: {2}}, [], set()),
        ({0: {1, 2}, 1: {0}, 2: set()}, [], {0, 1}),
        ({0: {1}, 1: {0}, 2: {3}}, [], {0, 1}),
    ],
)
def test_ranks_are_stuck_that_wait_for_each_other_or_for_one_that_has_ended(
    awaits: dict[int, set[int]], ended: list[int], expected: set[int]
) -> None:
    assert stuck(awaits, ended) == expected


def test_blamed_are_those_that_others_wait_for_and_that_wait_for_nobody() -> None:
    assert blamed({0: {1}, 1: {2}, 3: {1}}) == [2]
    assert blamed({0: {1, 4}, 1: {0}}) == [4]
    assert blamed({0: {1}, 1: {0}}) == []
    assert blamed({}) == []


def test_a_cycle_has_the_ranks_that_wait_for_each_other_in_order() -> None:
    assert cycle({3: {0}, 0: {2}, 2: {1}, 1: {0}}) == [0, 2, 1]
    assert cycle({0: {1}, 1: {2}}) == []
