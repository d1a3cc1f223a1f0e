"""Gradients as fp16 or bf16: half the bytes of fp32, without state.

An all-reduce of 16-bit values would round every partial sum, and not every backend has one for bf16. Instead, each rank
receives the values of one chunk from all others (all-to-all), sums them in fp32, and sends their mean to all
(all-gather). That takes as many bytes as the all-reduce, and rounds a value twice on any number of ranks.

fp16 has 11 significant bits, but values beyond 65,504 become infinite and those below 6e-8 zero; bf16 has 8 bits and
the range of fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from paceline.sync.collective_queue import Collectives, wait_for
from paceline.sync.compression import BucketSlices, Compression
from paceline.sync.exchange import Exchange, Scratch


class CastCompression(Compression):
    def __init__(self, exchange: Exchange, dtype: torch.dtype) -> None:
        super().__init__(exchange)
        self._dtype, self._scratch = dtype, Scratch()

    def _prepare(self, bucket: BucketSlices) -> Callable[[], Collectives[None]]:
        return partial(average_cast, bucket.flat, self._dtype, self.exchange, self._scratch)

    def sent_bytes(self, parameter: Tensor) -> float:
        return parameter.numel() * min(parameter.element_size(), self._dtype.itemsize)


def cast_mean(flat: Tensor, dtype: torch.dtype, exchange: Exchange) -> Tensor:
    """The mean over replicas of a 1-D tensor that is sent as `dtype`. Collective."""
    mean = flat.clone()
    wait_for(average_cast(mean, dtype, exchange, Scratch()))
    return mean


def average_cast(flat: Tensor, dtype: torch.dtype, exchange: Exchange, scratch: Scratch) -> Collectives[None]:
    """`cast_mean` in place. Values that have no more than 16 bits are sent as they are."""
    length, ranks = flat.numel(), exchange.ranks
    if not length:
        return
    if flat.element_size() <= dtype.itemsize:
        dtype = flat.dtype
    chunk = -(-length // ranks)
    sent, received = (scratch.empty(use, (ranks, chunk), dtype, flat.device) for use in ("sent", "received"))
    sent.view(-1)[:length].copy_(flat)
    sent.view(-1)[length:].zero_()
    # As bytes: backends lack some dtypes.
    yield exchange.all_to_all(received.view(torch.uint8), sent.view(torch.uint8))
    # This rank's own values need not be rounded.
    own = flat[exchange.rank * chunk : (exchange.rank + 1) * chunk]
    total = scratch.empty("total", (chunk,), torch.promote_types(flat.dtype, torch.float32), flat.device)
    total[: own.numel()].copy_(own)
    total[own.numel() :].zero_()
    for rank in range(ranks):
        if rank != exchange.rank:
            total += received[rank]
    mean = received[exchange.rank].copy_(total.div_(ranks))
    yield exchange.all_gather(sent.view(torch.uint8).view(-1), mean.view(torch.uint8))
    flat.copy_(sent.view(-1)[:length])
