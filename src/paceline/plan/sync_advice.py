"""Which method of `sync:` a model needs on a measured network.

    costs = compare(shapes, compute=0.12, buckets=buckets, links=links, ranks=2)
    sentence(costs, links["all_reduce"])
    # at 0.2 Gb/s this model waits 91 % of each step; powersgd rank 2 (sync: {compress: powersgd, rank: 2}) brings …

A method is sufficient if a step then waits at most 15 % of its time. Of those that are, the advice is the one that
changes training least: methods stand in that order. The time that compression itself takes is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from paceline.plan.network_model import COLLECTIVES, LinkModel, exposed_after

SUFFICIENT = 0.15  # of a step
MIN_RATIO = 2.0  # the default of sync.min_ratio
EVERY = 50  # steps of a round
RANKS = (4, 2, 1)  # of PowerSGD

Messages = Sequence[tuple[str, float]]  # collectives that run one after the other, each with its bytes


@dataclass(frozen=True)
class MethodCost:
    """`sent` bytes per step and rank; `waits`: the share of a step that is spent waiting for communication."""

    name: str
    settings: str  # in a recipe
    sent: float
    seconds: float  # per step that ranks wait
    waits: float


def compare(
    shapes: Sequence[Shape],
    *,
    compute: float,
    buckets: Sequence[tuple[float, float]],
    links: Mapping[str, LinkModel],
    ranks: int,
) -> list[MethodCost]:
    """What each method costs, uncompressed gradients first. `compute`: seconds of a step without communication.
    `buckets` of DDP: how many seconds before the last gradient each is ready, and its bytes. `links` are the fits of
    collectives; for one that was not measured, that of all_reduce is used."""
    dense = dense_bytes(shapes)

    def time(messages: Messages) -> float:
        return sum(links.get(name, links["all_reduce"]).time(name, size, ranks) for name, size in messages)

    def cost(name: str, settings: str, messages: Callable[[float], Messages], every: int = 1) -> MethodCost:
        """`messages` of a number of gradient bytes."""
        sent = sum(COLLECTIVES[each].parts(ranks) * size for each, size in messages(dense)) / every
        if every == 1:
            seconds = exposed_after([lead for lead, _ in buckets], [time(messages(size)) for _, size in buckets])
        else:
            seconds = time(messages(dense)) / every
        return MethodCost(name, settings, sent, seconds, seconds / (compute + seconds))

    costs = [
        cost("uncompressed gradients", "", lambda size: [("all_reduce", size)]),
        cost("fp16", "{compress: fp16}", lambda size: _in_two_phases(size, CAST_BYTES)),
        cost("int8", "{compress: int8}", lambda size: _in_two_phases(size, INT8_BYTES)),
    ]
    for rank in RANKS:
        name, settings = f"powersgd rank {rank}", f"{{compress: powersgd, rank: {rank}}}"
        costs.append(cost(name, settings, _factors(powersgd_bytes(shapes, rank, MIN_RATIO), dense)))
    settings = f"{{every: {EVERY}, outer: {{name: nesterov, lr: 0.7}}, compress: int8}}"
    costs.append(cost(f"a round every {EVERY} steps", settings, lambda size: _in_two_phases(size, INT8_BYTES), EVERY))
    return costs


def sentence(costs: Sequence[MethodCost], link: LinkModel) -> str:
    """One sentence: how long this model waits, and what to do about it."""
    dense, *methods = costs
    begin = f"at {link.bandwidth * 8 / 1e9:.2g} Gb/s this model waits {_percent(dense.waits)} of each step"
    if dense.waits <= SUFFICIENT:
        return f"{begin}, which leaves little to gain from sync"
    for each in methods:
        if each.waits <= SUFFICIENT:
            return f"{begin}; {each.name} brings that to {_percent(each.waits)} (sync: {each.settings})"
    best = min(methods, key=lambda each: each.waits)
    return f"{begin}; the best method, {best.name}, brings that only to {_percent(best.waits)} (sync: {best.settings})"


def _in_two_phases(size: float, value_bytes: float) -> Messages:
    """An all-to-all and an all-gather of compressed values, which are added up in fp32 in between."""
    compressed = size / VALUE_BYTES * value_bytes
    return [("all_to_all", compressed), ("all_gather", compressed)]


def _factors(factors: FactorBytes, dense: float) -> Callable[[float], Messages]:
    """The all-reduces of a bucket, as if matrices were spread evenly over buckets."""
    first, second = (factors.first + factors.uncompressed) / dense, factors.second / dense
    return lambda size: [("all_reduce", size * first), ("all_reduce", size * second)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


VALUE_BYTES = 4  # of a gradient in fp32
CAST_BYTES = 2  # fp16 and bf16
INT8_BLOCK = 256  # values that share a scale
INT8_BYTES = 1 + VALUE_BYTES / INT8_BLOCK

Shape = Sequence[int]


class FactorBytes(NamedTuple):
    """What PowerSGD all-reduces: the first factors with everything that stays uncompressed, then the second factors."""

    first: int
    second: int
    uncompressed: int

    @property
    def total(self) -> int:
        return self.first + self.second + self.uncompressed


def dense_bytes(shapes: Iterable[Shape]) -> int:
    return VALUE_BYTES * sum(prod(shape) for shape in shapes)


def powersgd_bytes(shapes: Iterable[Shape], rank: int, min_ratio: float) -> FactorBytes:
    first = second = uncompressed = 0
    for shape in shapes:
        if is_compressed(shape, rank, min_ratio):
            rows, columns = as_matrix(shape)
            first += rows * rank
            second += columns * rank
        else:
            uncompressed += prod(shape)
    return FactorBytes(VALUE_BYTES * first, VALUE_BYTES * second, VALUE_BYTES * uncompressed)


def is_compressed(shape: Shape, rank: int, min_ratio: float) -> bool:
    """Whether PowerSGD compresses a gradient of this shape."""
    if len(shape) < 2:
        return False
    rows, columns = as_matrix(shape)
    return (rows + columns) * rank * min_ratio <= rows * columns


def as_matrix(shape: Shape) -> tuple[int, int]:
    return shape[0], prod(shape[1:])
