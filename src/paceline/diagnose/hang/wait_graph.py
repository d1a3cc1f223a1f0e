"""Who waits for whom: for each rank that waits, the ranks that it waits for.

blamed({0: {1}, 1: {2}})                # [2]: the others wait for it, and it waits for nobody
stuck({0: {1}, 1: {0}, 2: set()}, ())   # {0, 1}: they wait for each other
cycle({0: {1}, 1: {0}, 2: {0}})         # [0, 1]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

Awaits = Mapping[int, AbstractSet[int]]


def stuck(awaits: Awaits, ended: Collection[int]) -> set[int]:
    """The ranks that never continue, if all of this is true at one moment: those that have ended, and those that wait
    for them or for each other."""
    found = {*awaits, *ended}
    while free := {rank for rank in found if rank not in ended and not awaits[rank] & found}:
        found -= free
    return found


def blamed(awaits: Awaits) -> list[int]:
    """The ranks that others wait for, directly or through others, and that wait for nobody."""
    return sorted({rank for start in awaits for rank in _reachable(awaits, start)} - awaits.keys())


def cycle(awaits: Awaits) -> list[int]:
    """Ranks that wait for each other, in order; empty if there are none."""
    for start in awaits:
        path = [start]
        while (following := sorted(awaits[path[-1]] & awaits.keys())) and following[0] not in path:
            path.append(following[0])
        if following:
            return path[path.index(following[0]) :]
    return []


def _reachable(awaits: Awaits, start: int) -> set[int]:
    found: set[int] = set()
    left = set(awaits[start])
    while left:
        rank = left.pop()
        if rank not in found:
            found.add(rank)
            left |= awaits.get(rank, set())
    return found
