"""Measures collectives of the default process group.

A round is a barrier and a number of calls, so that small messages take longer than the ranks need to leave the barrier.
The time of a call is that of the slowest rank, and of several rounds the median. The first two calls of a size are not
counted: they connect ranks and allocate buffers, and show how long the others will take.

All-gather and all-to-all are those of `sync/exchange.py`, which compression uses: on gloo, large messages travel in
both directions of a link at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
import torch.distributed as torch_dist

from paceline.parallel.sync.exchange import Exchange
from paceline.plan.network_model import COLLECTIVES
from paceline.runtime.collective_calls import reduce_scatter_single
from paceline.tools.bench.comm_request import format_size

_ROUNDS = 5
_ROUND_SECONDS = 0.02  # for which calls are repeated
_MAX_CALLS = 100  # of a round
_VALUE_BYTES = 4


@dataclass(frozen=True)
class Timing:
    """The median time of a collective of `size` bytes, with the bandwidths as nccl-tests defines them."""

    size: int
    seconds: float
    ranks: int
    collective: str

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second, from the size of the message."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each rank sends, which can be compared with the speed of its link."""
        return self.algorithm_bandwidth * COLLECTIVES[self.collective].parts(self.ranks)


@dataclass(frozen=True)
class CollectiveTimes:
    """`note`: why sizes are missing; empty if none is."""

    collective: str
    timings: Sequence[Timing]
    note: str = ""


def measure(collective: str, sizes: Sequence[int], device: torch.device, seconds: float) -> CollectiveTimes:
    """Measure ascending sizes until `seconds` would be exceeded. Collective: must be called on every rank."""
    timings: list[Timing] = []
    spent, ranks = 0.0, torch_dist.get_world_size()
    for wanted in sizes:
        size = max(1, wanted // (_VALUE_BYTES * ranks)) * _VALUE_BYTES * ranks  # equal parts of whole values
        call = _prepare(collective, size, device)
        [first] = _slowest([_round(call, 1, device)], device)
        spent += first
        if timings and spent + (1 + _ROUNDS) * first > seconds:  # equal on every rank
            last = format_size(timings[-1].size)
            note = f"stopped at {last}: {format_size(wanted)} would exceed {seconds:g} s (--seconds)"
            return CollectiveTimes(collective, timings, note)
        each, took = _time(call, device)
        timings.append(Timing(size, each, ranks, collective))
        spent += took
    return CollectiveTimes(collective, timings)


def _prepare(collective: str, size: int, device: torch.device) -> Callable[[int], object]:
    """A function that runs the collective once, given the number of the call."""
    exchange = Exchange()
    ranks, rank = exchange.ranks, exchange.rank
    whole = torch.zeros(size // _VALUE_BYTES, dtype=torch.float32, device=device)
    part = whole[: whole.numel() // ranks].clone()

    gathered = torch.empty_like(whole) if collective in ("all_gather", "all_to_all") else whole

    def point_to_point(number: int) -> None:
        """To and fro between the first and the last rank, which are on different nodes if there are several."""
        sender, receiver = (0, ranks - 1) if number % 2 == 0 else (ranks - 1, 0)
        if rank == sender:
            torch_dist.send(whole, receiver)
        elif rank == receiver:
            torch_dist.recv(whole, sender)

    calls: dict[str, Callable[[int], object]] = {
        "all_reduce": lambda number: torch_dist.all_reduce(whole),
        "all_gather": lambda number: exchange.all_gather(gathered, part).wait(),
        "reduce_scatter": lambda number: reduce_scatter_single(part, whole),
        "all_to_all": lambda number: exchange.all_to_all(gathered, whole).wait(),
        # A sender does not wait for receivers: with the same root, the next message would start before this one ends.
        "broadcast": lambda number: torch_dist.broadcast(whole, number % ranks),
        "point_to_point": point_to_point,
    }
    return calls[collective]


def _time(call: Callable[[int], object], device: torch.device) -> tuple[float, float]:
    """Seconds of a call, and those that were spent; equal on every rank. One call has been made."""
    [estimate] = _slowest([_round(call, 1, device)], device)
    calls = min(_MAX_CALLS, max(1, int(_ROUND_SECONDS / estimate)))
    rounds = _slowest([_round(call, calls, device) for _ in range(_ROUNDS)], device)
    return median(rounds), estimate + calls * sum(rounds)


def _round(call: Callable[[int], object], calls: int, device: torch.device) -> float:
    """Seconds per call."""
    torch_dist.barrier()
    _synchronize(device)
    began = perf_counter()
    for number in range(calls):
        call(number)
    _synchronize(device)
    return (perf_counter() - began) / calls


def _slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """The maximum over ranks."""
    tensor = torch.tensor(seconds, dtype=torch.float64, device=device)
    torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MAX)
    slowest: list[float] = tensor.tolist()
    return slowest


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
