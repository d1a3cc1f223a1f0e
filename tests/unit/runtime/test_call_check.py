from __future__ import annotations

import pytest

from paceline.runtime.call_check import CallPlace, Posted, Verdict, find_stuck


def waits(group: str, number: int, members: list[int], serial: int = 1, **counts: int) -> Posted:
    return Posted(
        CallPlace(group, number, "barrier()", "a.py:1"), members, {**counts, group: number}, [], serial, False, False
    )


def ended(**counts: int) -> Posted:
    return Posted(CallPlace("world", counts["world"], "barrier()", "a.py:1"), [0, 1], counts, [], 1, True, False)


@pytest.mark.parametrize(
    ("posts", "stuck"),
    [
        ({0: waits("world", 3, [0, 1])}, set()),  # rank 1 runs
        ({0: waits("world", 3, [0, 1]), 1: waits("pair", 1, [0, 1], world=2)}, {0, 1}),
        ({0: waits("world", 3, [0, 1]), 1: waits("pair", 1, [0, 1], world=3)}, set()),  # an older post: it has passed
        ({0: waits("world", 3, [0, 1]), 1: ended(world=2)}, {0, 1}),
        ({0: waits("world", 3, [0, 1]), 1: ended(world=3)}, {1}),
        # 0 waits for 1, 1 for 2, and 2 for 0, each in another group
        ({0: waits("a", 1, [0, 1]), 1: waits("b", 1, [1, 2]), 2: waits("c", 1, [0, 2])}, {0, 1, 2}),
        ({0: waits("a", 1, [0, 1]), 1: waits("b", 1, [1, 2])}, set()),
    ],
)
def test_ranks_are_stuck_that_wait_for_each_other_or_for_one_that_has_ended(
    posts: dict[int, Posted], stuck: set[int]
) -> None:
    assert find_stuck(posts) == stuck


def test_a_group_that_another_thread_uses_is_not_waited_for_in_vain() -> None:
    busy = waits("pair", 1, [0, 1], world=2)._replace(background=["world"])
    assert find_stuck({0: waits("world", 3, [0, 1]), 1: busy}) == set()


def test_nothing_is_certain_until_all_have_posted_twice_again() -> None:
    verdict = Verdict()

    def look(*serials: int, now: float) -> set[int]:
        places = waits("world", 3, [0, 1], serials[0]), waits("pair", 1, [0, 1], serials[1], world=2)
        return set(verdict.look(dict(enumerate(places)), now))

    assert look(1, 1, now=0.0) == set()
    assert look(2, 1, now=0.1) == set()
    assert look(3, 2, now=0.2) == set()
    assert look(4, 3, now=0.3) == {0, 1}
    assert look(4, 3, now=9.0) == set()  # whoever does not post again runs
