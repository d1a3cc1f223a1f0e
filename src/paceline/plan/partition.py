"""Partition a sequence of layers into consecutive parts: pipeline stages, or the devices of `strategy: split`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced_partition(costs: Sequence[float], parts: int) -> list[int]:
    """Lengths of `parts` consecutive non-empty parts that minimize the highest cost of a part.

    There must be at least as many costs as parts.
    """
    total = [0.0, *accumulate(costs)]
    count = len(costs)
    best = [[total[end] for end in range(count + 1)]]  # [k][end]: highest cost of k + 1 parts of the first `end`
    starts = [[0] * (count + 1)]
    for k in range(1, parts):
        row, begins = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(k + 1, count + 1):
            row[end], begins[end] = min(
                (max(best[k - 1][start], total[end] - total[start]), start) for start in range(k, end)
            )
        best.append(row)
        starts.append(begins)
    lengths, end = [], count
    for k in reversed(range(parts)):
        start = starts[k][end]
        lengths.append(end - start)
        end = start
    return lengths[::-1]


class UnknownLayerError(ValueError):
    """`balance:` names a layer that does not exist."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class BalanceError(ValueError):
    """`balance:` does not describe the requested number of non-empty parts."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.lengths = lengths


def parse_balance(balance: Sequence[int] | Sequence[str], names: Sequence[str], parts: int) -> list[int]:
    """The lengths given by a recipe's `balance:`, as numbers of layers or as the names of the first layers of parts."""
    if all(isinstance(entry, int) for entry in balance):
        lengths = [int(entry) for entry in balance]
    else:
        for entry in balance:
            if entry not in names:
                raise UnknownLayerError(str(entry))
        begins = [names.index(str(entry)) for entry in balance]
        begins = begins if begins[:1] == [0] else [0, *begins]
        lengths = [end - start for start, end in zip(begins, [*begins[1:], len(names)], strict=True)]
    if len(lengths) != parts or sum(lengths) != len(names) or min(lengths) < 1:
        raise BalanceError(lengths)
    return lengths
