"""The order in which the values of a batch's slices are added, the same on any number of ranks.

A sum of floating-point numbers depends on its order. Here it is a tree: the sum of slices 0 to 12 is that of 0 to 6
plus that of 6 to 12, and so on. A rank computes consecutive slices and adds what it can; whoever has the rest adds it
in the same order.

    total = SliceSum(slices, add)
    for span, value in parts:       # slice i is the span (i, i + 1); a sum that is already known is a longer one
        total.push(span, value)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

Span = tuple[int, int]  # the first slice, and the one after the last
T = TypeVar("T")


class SliceSum(Generic[T]):
    """Adds consecutive parts, in their order, as far as the tree allows: `parts` are the sums known so far.

    A rank that adds n slices holds at most 1 + log2(n) values at a time, rounded down: 4 of 12.
    """

    def __init__(self, slices: int, add: Callable[[T, T], T]) -> None:
        self._siblings, self._add = _siblings(slices), add
        self.parts: list[tuple[Span, T]] = []

    def push(self, span: Span, value: T) -> None:
        parts = self.parts
        while parts and (parts[-1][0], span) in self._siblings:
            left, before = parts.pop()
            span, value = (left[0], span[1]), self._add(before, value)
        parts.append((span, value))


def spans_of(slices: int, first: int, stop: int) -> list[Span]:
    """The sums that remain when the slices from `first` to `stop` are added without the others."""
    total = SliceSum[None](slices, lambda left, right: None)
    for each in range(first, stop):
        total.push((each, each + 1), None)
    return [span for span, _ in total.parts]


@cache
def _siblings(slices: int) -> frozenset[tuple[Span, Span]]:
    """The pairs of spans that are added. Of an odd number the first half is longer, so that fewer sums are held."""

    def below(first: int, stop: int) -> list[tuple[Span, Span]]:
        if stop - first == 1:
            return []
        middle = first + (stop - first + 1) // 2
        return [((first, middle), (middle, stop)), *below(first, middle), *below(middle, stop)]

    return frozenset(below(0, slices))
