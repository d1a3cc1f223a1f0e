"""Collectives between replicas, with a count of the bytes that this rank sends.

    exchange = Exchange(group)
    work = exchange.all_reduce(tensor, async_op=True)
    exchange.sent            # {"all_reduce": 4194304.0}

Counted is what an algorithm that is optimal in bandwidth sends, as those of gloo and NCCL are: a ring all-reduce of n
bytes over p ranks sends 2 n (p - 1) / p from each rank.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from paceline.runtime.collectives import Group


class Exchange:
    """`group`: the replicas that this rank reduces with; None: all ranks."""

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self.ranks, self.rank = torch_dist.get_world_size(group), torch_dist.get_rank(group)
        self.sent: dict[str, float] = defaultdict(float)  # bytes by collective

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Sum in place."""
        self.count("all_reduce", 2 * tensor.nbytes * (self.ranks - 1) / self.ranks)
        return torch_dist.all_reduce(tensor, group=self.group, async_op=async_op)

    def all_to_all(self, received: Tensor, sent: Tensor, *, async_op: bool = False) -> Any:
        """Send an equal part of `sent` to every rank; parts of `received` are in the order of ranks."""
        self.count("all_to_all", sent.nbytes * (self.ranks - 1) / self.ranks)
        return torch_dist.all_to_all_single(received, sent, group=self.group, async_op=async_op)

    def all_gather(self, received: Tensor, sent: Tensor, *, async_op: bool = False) -> Any:
        self.count("all_gather", sent.nbytes * (self.ranks - 1))
        return torch_dist.all_gather_into_tensor(received, sent, group=self.group, async_op=async_op)

    def count(self, collective: str, sent: float) -> None:
        """Count bytes that are sent without this class, as by DDP itself."""
        self.sent[collective] += sent
