"""Gradients as fp16 or bf16, half the bytes of fp32, without state; or as int8, a quarter, with error feedback.

An all-reduce of 16-bit values would round every partial sum, and not every backend has one for bf16. Instead, each rank
receives the values of one chunk from all others (all-to-all), sums them in fp32, and sends their mean to all
(all-gather). That takes as many bytes as the all-reduce, and rounds a value twice on any number of ranks.

fp16 has 11 significant bits, but values beyond 65,504 become infinite and those below 6e-8 zero; bf16 has 8 bits and
the range of fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.parallel.sync.compression import BucketSlices, Compression, KeptTensor, NamedState, StepEnd, add_unscaled
from paceline.parallel.sync.exchange import Collectives, Exchange, Scratch, wait_for

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BLOCK = 256
_LARGEST = 127
_TINY = 1e-30  # of a block's largest value; smaller ones are kept back, because their scale could underflow


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


class Int8Compression(Compression):
    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self._errors = NamedState()
        self._step_end, self._scratch = StepEnd(), Scratch()

    def _prepare(self, bucket: BucketSlices) -> Callable[[], Collectives[None]]:
        blocks = Blocks.of(bucket.flat.numel(), self.exchange.ranks)
        padded = bucket.flat.new_empty(blocks.padded, dtype=torch.promote_types(bucket.flat.dtype, torch.float32))
        return partial(self._average, bucket, self._errors.collect(bucket.slots, like=padded))

    def _average(self, bucket: BucketSlices, error: KeptTensor) -> Collectives[None]:
        length, scale = bucket.flat.numel(), 1.0 if self.scale is None else self.scale()
        values = error.next
        add_unscaled(error.value[:length], bucket.flat, scale, out=values[:length])
        values[length:].zero_()
        finite = yield from average_int8(values, bucket.flat, self.exchange, self._scratch, scale)
        self._step_end.add(bucket.is_first, bucket.is_last, finite, error)

    def sent_bytes(self, parameter: Tensor) -> float:
        return parameter.numel() * (1 + 4 / BLOCK)

    def local_state(self) -> dict[str, Tensor]:
        return self._errors.state()

    def load(self, replicated: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        super().load(replicated, local)
        self._errors.load(local)


def int8_mean(flat: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """The mean over replicas of a 1-D tensor that is sent as int8, and what was lost of this rank's values: added to
    those of the next call, it makes up for it. Collective."""
    values = flat.new_zeros(Blocks.of(flat.numel(), exchange.ranks).padded, dtype=torch.float32)
    values[: flat.numel()].copy_(flat)
    mean = torch.empty_like(flat)
    wait_for(average_int8(values, mean, exchange, Scratch()))
    return mean, values[: flat.numel()].to(flat.dtype)


class Blocks(NamedTuple):
    """How a flat tensor is divided: one chunk for each rank, in blocks of equal size, the last of which are padded."""

    ranks: int
    number: int  # of blocks in a chunk
    size: int

    @classmethod
    def of(cls, length: int, ranks: int) -> Blocks:
        chunk = -(-length // ranks)
        size = BLOCK if chunk > BLOCK else -(-chunk // 4) * 4  # scales behind it need an address divisible by 4
        return cls(ranks, -(-chunk // size) if size else 0, size)

    @property
    def padded(self) -> int:
        return self.ranks * self.number * self.size


def average_int8(
    values: Tensor, mean: Tensor, exchange: Exchange, scratch: Scratch, scale: Tensor | float = 1.0
) -> Collectives[Tensor]:
    """Write the mean of `values`, times `scale`, to `mean`, and to `values` what was lost. Returns whether it is
    finite. `values` is padded with zeros."""
    length, rank = mean.numel(), exchange.rank
    blocks = Blocks.of(length, exchange.ranks)
    if not length:
        return torch.ones((), dtype=torch.bool, device=values.device)
    chunks = values.view(*blocks)
    sent, received = (_Message(use, blocks, blocks.ranks, values, scratch) for use in ("sent", "received"))
    others = [other for other in range(blocks.ranks) if other != rank]
    for other in others:
        sent.write(other, chunks[other])
    yield exchange.all_to_all(received.data, sent.data)
    own = chunks[rank]  # need not be rounded
    for other in others:
        own.addcmul_(received.values[other], received.scales[other])
    own /= blocks.ranks
    reduced = _Message("sent", blocks, 1, values, scratch)
    reduced.write(0, own)
    own *= blocks.ranks
    yield exchange.all_gather(received.data.view(-1), reduced.data.view(-1))
    finite = received.scales.isfinite().all()
    scales = received.scales.to(values.dtype) * scale
    chunk = blocks.number * blocks.size
    whole = length // chunk
    torch.mul(received.values[:whole], scales[:whole], out=mean[: whole * chunk].view(-1, *blocks[1:]))
    if whole < blocks.ranks:
        rest = (received.values[whole:] * scales[whole:]).view(-1)
        mean[whole * chunk :].copy_(rest[: length - whole * chunk])
    return finite


class _Message:
    """A row of int8 values and fp32 scales for each of `rows` ranks."""

    def __init__(self, use: str, blocks: Blocks, rows: int, like: Tensor, scratch: Scratch) -> None:
        _, number, size = blocks
        self.data = scratch.empty(use, (rows, number * (size + 4)), torch.uint8, like.device)
        self.values = self.data[:, : number * size].view(torch.int8).view(rows, number, size)
        self.scales = self.data[:, number * size :].view(torch.float32).view(rows, number, 1)
        self._rounded = scratch.empty("rounded", (number, size), like.dtype, like.device)

    def write(self, row: int, values: Tensor) -> None:
        """Round `values`, and leave in them what was lost."""
        # On the CPU, aminmax takes ten times as long.
        largest = torch.maximum(values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True))
        scales = largest.float().clamp_(min=_TINY).div_(_LARGEST)
        rounded = torch.div(values, scales, out=self._rounded).round_()
        self.values[row].copy_(rounded)
        self.scales[row].copy_(scales)
        values.addcmul_(rounded, scales, value=-1.0)
