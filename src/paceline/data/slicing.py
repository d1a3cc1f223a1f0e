"""How a global batch is cut: into accumulation groups first, then each group over the data ranks.

All by arithmetic on lengths, so that every rank knows every other rank's share without a message, for any number of
ranks whether or not it divides the batch. A group is the same set of samples on any number of ranks, which is what
lets a batch norm's statistics, which belong to a group, agree between layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BatchSlice:
    """One rank's part of one group of a step's samples, as offsets into the global batch."""

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
        """Whether this group closes its step."""
        return self.group == self.groups - 1

    @property
    def rows(self) -> tuple[int, int]:
        """From where to where; a rank without samples of its own runs the group's first, to keep in step."""
        return (self.start, self.stop) if self.samples else (self.group_start, self.group_start + 1)


def cut(length: int, parts: int, part: int) -> tuple[int, int]:
    """Part number `part` of `length` things in order; parts differ by at most one."""
    return length * part // parts, length * (part + 1) // parts


def shares(samples: int, batch: int, groups: int, rank: int, ranks: int) -> Iterator[BatchSlice]:
    """A rank's shares of a step with `samples` samples; fewer than `batch` only in an epoch's last step.

    A short step has proportionally fewer groups, so that none is empty and micro-batches keep their size.
    """
    groups = max(1, -(-samples * groups // batch))
    for group in range(groups):
        group_start, group_stop = cut(samples, groups, group)
        start, stop = cut(group_stop - group_start, ranks, rank)
        yield BatchSlice(group, groups, group_start, group_stop, group_start + start, group_start + stop)
