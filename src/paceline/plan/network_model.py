"""The network between ranks as two numbers, latency and bandwidth, the time of collectives on it, and the bytes that a
rank sends.

    link = LinkModel.fit("all_reduce", ranks=2, points=[(1024, 90e-6), (1 << 20, 42e-3), …])     # bytes, seconds
    link.all_reduce_time(100e6, ranks=8)

A message of n bytes takes latency + n / bandwidth. A collective over p ranks is a number of rounds, in which each rank
sends a part of n, as in a ring. nccl-tests defines bus bandwidth by the same parts:

    collective                          rounds          bytes per rank
    all_reduce                          2 (p - 1)       2 n (p - 1) / p
    all_gather, reduce_scatter          p - 1           n (p - 1) / p         n: the whole, not the part of a rank
    all_to_all                          p - 1           n (p - 1) / p
    broadcast                           log2 p          n
    point_to_point                      1               n

`paceline bench comm` measures the points. Each collective has a fit of its own, because backends implement them
differently: the numbers of one predict it for other sizes and other numbers of ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, NamedTuple

from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.batch import derive_batch
from paceline.plan.layout import derive_layout
from paceline.text import plural


class Collective(NamedTuple):
    """`rounds` and `parts` of n bytes that each rank sends, given the number of ranks."""

    rounds: Callable[[int], float]
    parts: Callable[[int], float]


COLLECTIVES = {
    "all_reduce": Collective(lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p),
    "all_gather": Collective(lambda p: p - 1, lambda p: (p - 1) / p),
    "reduce_scatter": Collective(lambda p: p - 1, lambda p: (p - 1) / p),
    "all_to_all": Collective(lambda p: p - 1, lambda p: (p - 1) / p),
    "broadcast": Collective(lambda p: ceil(log2(p)), lambda p: 1.0),
    "point_to_point": Collective(lambda p: 1, lambda p: 1.0),
}


@dataclass(frozen=True)
class LinkModel:
    """`latency` of a round in seconds, `bandwidth` in bytes per second. `worst_error` is the largest relative error of
    the fit."""

    latency: float
    bandwidth: float
    worst_error: float = 0.0

    @classmethod
    def fit(cls, collective: str, ranks: int, points: Iterable[tuple[float, float]]) -> LinkModel:
        """Least squares of the relative error over (bytes, seconds), so that small messages count as much as large
        ones. At least two different sizes are needed."""
        known = list(points)
        if len({size for size, _ in known}) < 2:
            raise ValueError("a fit needs at least two sizes")
        kind = COLLECTIVES[collective]
        # The unknowns a and b of a·rounds + b·bytes, each equation divided by its measured time.
        rows = [(kind.rounds(ranks) / seconds, kind.parts(ranks) * size / seconds) for size, seconds in known]
        aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
        a, b = sum(row[0] for row in rows), sum(row[1] for row in rows)
        determinant = aa * bb - ab * ab
        latency, inverse = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if latency < 0:  # noise: then the bandwidth alone
            latency, inverse = 0.0, b / bb
        elif inverse <= 0:  # no size was large enough to show the bandwidth: it counts as infinite
            latency, inverse = a / aa, 0.0
        bandwidth = 1 / inverse if inverse else float("inf")
        worst = max(abs(row[0] * latency + row[1] * inverse - 1) for row in rows)
        return cls(latency, bandwidth, worst)

    def time(self, collective: str, size: float, ranks: int) -> float:
        """Seconds of a collective of `size` bytes; 0 on one rank, which does not communicate."""
        if ranks == 1:
            return 0.0
        kind = COLLECTIVES[collective]
        return kind.rounds(ranks) * self.latency + kind.parts(ranks) * size / self.bandwidth

    def all_reduce_time(self, size: float, ranks: int) -> float:
        return self.time("all_reduce", size, ranks)


# The speed-up of data parallelism over one GPU that is usually expected, from near-linear to diminishing returns.
EXPECTED = {2: (1.8, 1.9), 4: (3.5, 3.8), 8: (6.5, 7.5), 16: (12.0, 14.0)}


def exposed_after(leads: Sequence[float], times: Sequence[float], overlap: float = 1.0) -> float:
    """Seconds of communication after the last gradient. `leads`: how much earlier each bucket is ready; `times`: how
    long its reduction takes; `overlap`: the share of this work that can be done during the backward."""
    end = -float("inf")
    for lead, seconds in zip(leads, times, strict=True):
        end = max(end, -lead) + seconds
    return overlap * max(0.0, end) + (1.0 - overlap) * sum(times)


def free_cores(cores: int, ranks: int) -> float:
    """Cores for the communication of each rank while all of them compute, at most 1."""
    return min(1.0, max(0.0, cores / ranks - 1.0))


def scaled(config: Config, mode: str, ranks: int, first: int) -> Config:
    """The recipe with another batch. Strong scaling keeps that of the recipe on the `first` number of ranks; weak
    scaling keeps the part of each rank."""
    batch = derive_batch(config, derive_layout(config, first)).size
    size = batch if mode == "strong" else round(batch * ranks / first)
    if size < ranks:
        raise ConfigError(
            "batch-smaller-than-ranks", f"A batch of {plural(size, 'sample')} can't be divided among {ranks} ranks."
        )
    accumulate = None if config.micro_batch is not None else config.accumulate  # then it follows from the other two
    return Config.from_dict({**config.to_dict(), "batch": size, "batch_per_rank": None, "accumulate": accumulate})


def bare(config: Config) -> Config:
    """The steps of a recipe: without files, and without evaluations, which its schedule might need."""
    changes: dict[str, Any] = {
        "train": {"max_steps": 1},
        "schedule": {"name": "constant"},
        "run": False,
        "resume": None,
        "quiet": True,
        "save_last": False,
        "loggers": [],
        "metrics": [],
    }
    absent = ("init_from", "eval_every", "save_every", "save_minutes", "save_best", "early_stop", "profile")
    return Config.from_dict({**config.to_dict(), **changes, **dict.fromkeys(absent)})


def digest(config: Config) -> str:
    """Equal for recipes with the same steps."""
    values = bare(config).model_dump(mode="json", exclude={"launch", "env", "port", "timeout", "tags"})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


COUNTED = ("all_reduce", "all_gather", "all_to_all", "broadcast")


class Traffic:
    """Bytes that this rank sends, by collective, worked out from the sizes of tensors.

        traffic = Traffic()
        traffic.all_reduce(4 * 1024, ranks=4)      # beside the call: nothing is measured
        traffic.take()                             # bytes since the last time, in the order of COUNTED

    Counted is what algorithms that are optimal in bandwidth send, as those of gloo and NCCL are: a ring all-reduce of n
    bytes over p ranks sends 2 n (p - 1) / p from each of them. Headers and acknowledgements are not included. Sizes are
    those of the tensor that this rank passes to the collective.
    """

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
        """Bytes since the last call, in the order of COUNTED."""
        before, self._taken = self._taken, dict(self.sent)
        return [self._taken.get(name, 0.0) - before.get(name, 0.0) for name in COUNTED]
