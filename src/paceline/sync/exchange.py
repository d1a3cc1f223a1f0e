"""Collectives between replicas, with a count of the bytes that this rank sends.

    exchange = Exchange(group)
    work = exchange.all_reduce(tensor, async_op=True)
    exchange.sent            # {"all_reduce": 4194304.0}

Bytes are worked out from sizes, as described in `plan/traffic.py`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from paceline.plan.traffic import Traffic
from paceline.runtime.collectives import Group

# Renamed in torch 2.13; the old name is deprecated.
_all_gather_single = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor


class Exchange:
    """`group`: the replicas that this rank reduces with; None: all ranks. `traffic`: where bytes are counted, together
    with those that other parts send."""

    def __init__(self, group: Group = None, traffic: Traffic | None = None) -> None:
        self.group, self.traffic = group, traffic or Traffic()
        self.ranks, self.rank = torch_dist.get_world_size(group), torch_dist.get_rank(group)

    @property
    def sent(self) -> dict[str, float]:
        """Bytes by collective."""
        return self.traffic.sent

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Sum in place."""
        self.traffic.all_reduce(tensor.nbytes, self.ranks)
        return torch_dist.all_reduce(tensor, group=self.group, async_op=async_op)

    def all_to_all(self, received: Tensor, sent: Tensor, *, async_op: bool = False) -> Any:
        """Send an equal part of `sent` to every rank; parts of `received` are in the order of ranks."""
        self.traffic.all_to_all(sent.nbytes, self.ranks)
        return torch_dist.all_to_all_single(received, sent, group=self.group, async_op=async_op)

    def all_gather(self, received: Tensor, sent: Tensor, *, async_op: bool = False) -> Any:
        self.traffic.all_gather(sent.nbytes, self.ranks)
        return _all_gather_single(received, sent, group=self.group, async_op=async_op)
