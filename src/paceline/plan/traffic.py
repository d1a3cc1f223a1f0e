"""Bytes that this rank sends, by collective, worked out from the sizes of tensors.

    traffic = Traffic()
    traffic.all_reduce(4 * 1024, ranks=4)      # beside the call: nothing is measured
    traffic.take()                             # bytes since the last time, in the order of COLLECTIVES

Counted is what algorithms that are optimal in bandwidth send, as those of gloo and NCCL are: a ring all-reduce of n
bytes over p ranks sends 2 n (p - 1) / p from each of them. Headers and acknowledgements are not included.
"""

from __future__ import annotations

from collections import defaultdict

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast")


class Traffic:
    """Sizes are in bytes, and those of the tensor that this rank passes to the collective."""

    def __init__(self) -> None:
        self.sent: dict[str, float] = defaultdict(float)  # by collective, since the beginning
        self._taken: dict[str, float] = {}

    def all_reduce(self, size: int, ranks: int) -> None:
        self.sent["all_reduce"] += 2 * size * (ranks - 1) / ranks

    def all_gather(self, size: int, ranks: int) -> None:
        self.sent["all_gather"] += size * (ranks - 1)

    def all_to_all(self, size: int, ranks: int) -> None:
        self.sent["all_to_all"] += size * (ranks - 1) / ranks

    def broadcast(self, size: int, ranks: int, rank: int) -> None:
        """From the first of the ranks, along a binomial tree: this rank passes it on to those below it."""
        below = [distance for distance in (1 << n for n in range(ranks.bit_length())) if rank < distance]
        self.sent["broadcast"] += size * sum(rank + distance < ranks for distance in below)

    def take(self) -> list[float]:
        """Bytes since the last call, in the order of COLLECTIVES."""
        before, self._taken = self._taken, dict(self.sent)
        return [self._taken.get(name, 0.0) - before.get(name, 0.0) for name in COLLECTIVES]
