"""Whether a figure moved by more than its noise, decided from rounds that measured two commits one after the other.

A time has moved if the Wilcoxon signed-rank test of the rounds' differences says so (two-sided, exact, p ≤ 0.005), and
if their median is at least 2 %: two checkouts of the same commit can differ by less, for as long as they exist. With 9
rounds this means that all of them agree; with fewer nothing is decided. A count has moved if its median changed by half
a call or more: what depends on time, such as polling other ranks, takes a few calls in some of the counted steps.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

SIGNIFICANT = 0.005
SMALLEST = 0.02  # relative
LEAST_COUNT = 0.5
COUNTS = ("calls", "modules")  # units
NEEDED = math.ceil(1 - math.log2(SIGNIFICANT))  # rounds
UNCHANGED, UNDECIDED = "-", "?"
WORSE = ("slower", "more")


def verdict(before: Sequence[float], after: Sequence[float], unit: str, smallest: float | None = None) -> str:
    """slower or faster, more or fewer; `-`: within the noise; `?`: too few rounds to tell. `smallest`: the least
    difference that counts, for a figure that may be close to zero or negative."""
    if unit in COUNTS:
        change = statistics.median(after) - statistics.median(before)
        return UNCHANGED if abs(change) < LEAST_COUNT else "more" if change > 0 else "fewer"
    if len(before) < NEEDED:
        return UNDECIDED
    pairs = list(zip(before, after, strict=True))
    if smallest is None:
        moves, smallest = [math.log(new / old) for old, new in pairs], math.log1p(SMALLEST)
    else:
        moves = [new - old for old, new in pairs]
    middle = statistics.median(moves)
    if abs(middle) < smallest or signed_rank_p(moves) > SIGNIFICANT:
        return UNCHANGED
    return "slower" if middle > 0 else "faster"


def signed_rank_p(differences: Sequence[float]) -> float:
    """The probability of differences that are at least as one-sided if either sign is equally likely."""
    found = [difference for difference in differences if difference]
    sizes = sorted(map(abs, found))
    ranks = [2 * sizes.index(abs(each)) + sizes.count(abs(each)) + 1 for each in found]  # doubled: ties share theirs
    positive = sum(rank for rank, each in zip(ranks, found, strict=True) if each > 0)
    smaller = min(positive, sum(ranks) - positive)
    ways = Counter({0: 1})  # sum of the ranks with one sign -> number of sign patterns
    for rank in ranks:
        for total, number in list(ways.items()):
            ways[total + rank] += number
    return min(1.0, 2 * sum(number for total, number in ways.items() if total <= smaller) / 2 ** len(ranks))
