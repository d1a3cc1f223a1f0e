"""Compression of gradients that replicas average: the base class, a communication hook of torch's DDP.

    exchange = Exchange(group)                       # a group that nothing else uses during a backward
    compression = build_compression(config.sync, exchange)
    compression.begin({parameter: name, …})
    ddp.register_comm_hook(compression, lambda compression, bucket: compression.reduce(bucket))

| sync.compress | sent                                            | state                                        |
|---------------|-------------------------------------------------|----------------------------------------------|
| fp16, bf16    | 16-bit values; sums in fp32                     | –                                            |
| int8          | 8-bit values with a scale per 256; sums in fp32 | error feedback                               |
| powersgd      | two thin factors of each matrix                 | error feedback, the factors of the last step |

Error feedback is what this rank's gradients lost in compression; it is added to those of the next step. It is kept by
parameter name, because DDP distributes parameters to buckets anew after its first backward and whenever it is rebuilt.
It is kept in the units of gradients without loss scale, which may change between steps.

A step with a non-finite gradient on any rank has a non-finite result on every rank, and leaves all state as it was:
the loss scaler and `nonfinite: skip` skip such a step, so nothing was sent and nothing was lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from paceline.sync.exchange import CollectiveQueue, Collectives, Exchange
from paceline.sync.named_state import Slot

if TYPE_CHECKING:
    from paceline.config.sections import SyncSection


class BucketSlices:
    """The gradients of one bucket: a flat tensor, of which parameters have slices in DDP's order."""

    def __init__(self, bucket: GradBucket, names: Mapping[Tensor, str]) -> None:
        self.flat = bucket.buffer()
        self.slots: list[Slot] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            # DDP copies gradients in the memory format of the parameter, but `gradients()` are contiguous views.
            dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
            stride = parameter.stride() if dense else gradient.stride()
            offset = int(gradient.storage_offset() - self.flat.storage_offset())
            self.slots.append(Slot(names[parameter], parameter.size(), stride, offset))
        self.is_first, self.is_last = bucket.index() == 0, bucket.is_last()


class Compression(ABC):
    """Averages the buckets of DDP over the replicas of `exchange`.

    `scale`: returns the factor by which gradients are currently scaled (fp16); None: 1.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.scale: Callable[[], Tensor | float] | None = None
        self._names: Mapping[Tensor, str] = {}
        self._queue = CollectiveQueue()
        self._buckets: dict[int, tuple[Tensor, Callable[[], Collectives[None]]]] = {}

    def begin(self, names: Mapping[Tensor, str]) -> None:
        """Name the parameters."""
        self._names = names
        self._buckets.clear()

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """The mean of a bucket over the replicas, in place."""
        flat = bucket.buffer()
        index = bucket.index()
        # The tensor is held, so its address belongs to no other bucket.
        if index not in self._buckets or self._buckets[index][0].data_ptr() != flat.data_ptr():
            self._buckets[index] = flat, self._prepare(BucketSlices(bucket, self._names))
        if bucket.is_last():  # of a wrapper that had more buckets
            self._buckets = {number: kept for number, kept in self._buckets.items() if number <= index}
        return self._queue.submit(self._buckets[index][1](), flat)

    @abstractmethod
    def _prepare(self, bucket: BucketSlices) -> Callable[[], Collectives[None]]:
        """A function that is called in every step, for collectives that replace `bucket.flat` by its mean."""

    @abstractmethod
    def sent_bytes(self, parameter: Tensor) -> float:
        """The size of what is reduced for the gradient of a parameter in a step: `parameter.nbytes` uncompressed."""

    def replicated_state(self) -> dict[str, Tensor]:
        """State that is equal on all replicas. Valid until the next step: copy what is kept longer."""
        return {}

    def local_state(self) -> dict[str, Tensor]:
        """This rank's error feedback, by parameter name. Valid until the next step. On another number of ranks, every
        rank loads the mean over the saved ones: their sum then has the same share in the mean of the gradients."""
        return {}

    def load(self, replicated: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        """Restore what `replicated_state` and `local_state` returned; what is missing starts anew."""
        self._buckets.clear()


def dense_mean(flat: Tensor, exchange: Exchange) -> Collectives[None]:
    """The uncompressed mean, in place."""
    if flat.numel():
        yield exchange.all_reduce(flat, async_op=True)
        flat /= exchange.ranks


def build_compression(section: SyncSection, exchange: Exchange) -> Compression:
    """The compression that `sync.compress` names."""
    from paceline.sync.casts import CastCompression, Int8Compression
    from paceline.sync.powersgd import PowerSGD

    match section.compress:
        case "fp16":
            return CastCompression(exchange, torch.float16)
        case "bf16":
            return CastCompression(exchange, torch.bfloat16)
        case "int8":
            return Int8Compression(exchange)
        case "powersgd":
            settings = section.model_dump(include={"rank", "start", "min_ratio", "warm_start"})
            return PowerSGD(exchange, **settings)
    raise ValueError(f"sync.compress is {section.compress}")
