"""Slices a global batch into accumulation groups, then each group across the data ranks.

Slices are computed from lengths, so every rank knows the slices of all ranks without communication, whether or not the
number of ranks divides the batch. A group contains the same samples on any number of ranks, so the batch norm
statistics of a group agree between layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Generic, TypeVar


@dataclass(frozen=True)
class BatchSlice:
    """The slice of one rank in one accumulation group, as offsets into the global batch."""

    group: int
    groups: int
    group_start: int
    group_stop: int
    start: int
    stop: int

    @cached_property
    def samples(self) -> int:
        return self.stop - self.start

    @cached_property
    def last(self) -> bool:
        """Whether this is the last group of its step."""
        return self.group == self.groups - 1

    @cached_property
    def rows(self) -> tuple[int, int]:
        """Start and stop; a rank without samples runs the first sample of the group, with weight zero."""
        return (self.start, self.stop) if self.samples else (self.group_start, self.group_start + 1)


def slice_bounds(length: int, parts: int, part: int) -> tuple[int, int]:
    """Bounds of slice `part` of `parts`; the sizes differ by at most one."""
    return length * part // parts, length * (part + 1) // parts


def fixed_slices(samples: int, slices: int, rank: int, ranks: int) -> Iterator[BatchSlice]:
    """The slices of a rank if a step is cut into `slices` on any number of ranks: consecutive ones, each in a group.
    Where there are fewer samples, some are empty, with the same placeholder everywhere."""
    groups = slices // ranks
    for group in range(groups):
        start, stop = slice_bounds(samples, slices, rank * groups + group)
        yield BatchSlice(group, groups, start, stop, start, stop)


def slices_of(samples: int, batch: int, groups: int, rank: int, ranks: int) -> Iterator[BatchSlice]:
    """The slices of a rank in a step of `samples` samples; fewer than `batch` only in the last step of an epoch.

    A short step has proportionally fewer groups, so that none is empty and micro-batches keep their size.
    """
    groups = max(1, -(-samples * groups // batch))
    for group in range(groups):
        group_start, group_stop = slice_bounds(samples, groups, group)
        start, stop = slice_bounds(group_stop - group_start, ranks, rank)
        yield BatchSlice(group, groups, group_start, group_stop, group_start + start, group_start + stop)


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
