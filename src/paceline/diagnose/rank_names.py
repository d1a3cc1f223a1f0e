"""Names ranks in messages: "rank 2", "ranks 0, 1 and 3", "ranks 4 (node 1) and 5 (node 1)"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

_MAX_NAMED = 8
_ONE_NODE: Mapping[int, int] = MappingProxyType({})


def rank_names(ranks: Iterable[int], nodes: Mapping[int, int] = _ONE_NODE) -> str:
    """`nodes`: the node of each rank, if there are several."""
    found = sorted(ranks)
    numbers = [f"{rank} (node {nodes[rank]})" if rank in nodes else str(rank) for rank in found[:_MAX_NAMED]]
    if len(found) == 1:
        return f"rank {numbers[0]}"
    last = f"{len(found) - _MAX_NAMED} others" if len(found) > _MAX_NAMED else numbers.pop()
    return f"ranks {', '.join(numbers)} and {last}"
