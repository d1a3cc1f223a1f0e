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

DDP hands out flat buckets, and what is kept for a bucket is flat as well: one operation then covers all its parameters.
Which parameters share a bucket changes when DDP rebuilds its buckets, so a bucket that is new collects the values of
its parameters wherever they are.

Of each tensor there are two copies, the value and the next one. The next value replaces the other when the step has
ended, if the gradients of all buckets were finite; else the step is skipped, and every value stays as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from paceline.config.sections import SyncSection
from paceline.parallel.sync.exchange import CollectiveQueue, Collectives, Exchange


class Slot(NamedTuple):
    """The place of a parameter in a flat tensor."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.size)

    def of(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)


class KeptTensor:
    """`copies[current]` is the value, the other copy the next one."""

    def __init__(self, slots: Sequence[Slot], like: Tensor) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self.copies, self.current = (torch.zeros_like(like), torch.zeros_like(like)), 0

    @property
    def value(self) -> Tensor:
        return self.copies[self.current]

    @property
    def next(self) -> Tensor:
        return self.copies[1 - self.current]

    def end_step(self, finite: Tensor) -> None:
        if finite.is_cuda:  # without waiting for the device
            torch.where(finite, self.next, self.value, out=self.value)
        elif finite:
            self.current = 1 - self.current


class NamedState:
    def __init__(self, initial: Callable[[str, Tensor], object] | None = None) -> None:
        """`initial` sets the value of a parameter that has none; default: zero."""
        self._initial = initial
        self._owners: dict[str, KeptTensor] = {}
        self._loaded: dict[str, Tensor] = {}

    def collect(self, slots: Sequence[Slot], like: Tensor) -> KeptTensor:
        """A tensor like `like` that has the current values in its slots."""
        kept = KeptTensor(slots, like)
        for slot in slots:
            view, before = slot.of(kept.value), self._get(slot.name)
            if before is not None:
                view.copy_(before)
            elif self._initial is not None:
                self._initial(slot.name, view)
            self._owners[slot.name] = kept
            self._loaded.pop(slot.name, None)
        return kept

    def state(self) -> dict[str, Tensor]:
        found = {name: kept.slots[name].of(kept.value) for name, kept in self._owners.items()}
        return {**self._loaded, **found}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._owners.clear()
        self._loaded = dict(tensors)

    def _get(self, name: str) -> Tensor | None:
        kept = self._owners.get(name)
        return self._loaded.get(name) if kept is None else kept.slots[name].of(kept.value)


class StepEnd:
    """Ends a step for all tensors of its buckets, when the last bucket is done."""

    def __init__(self) -> None:
        self._finite: list[Tensor] = []
        self._changed: list[KeptTensor] = []

    def add(self, is_first: bool, is_last: bool, finite: Tensor, *changed: KeptTensor) -> None:
        if is_first:  # also after a backward that failed
            self._finite, self._changed = [], []
        self._finite.append(finite)
        self._changed.extend(changed)
        if is_last:
            all_finite = torch.stack(self._finite).all()
            for kept in self._changed:
                kept.end_step(all_finite)


def add_unscaled(kept: Tensor, gradients: Tensor, scale: Tensor | float, *, out: Tensor) -> None:
    """Add gradients without their loss scale to what is kept."""
    if isinstance(scale, Tensor):
        torch.addcmul(kept, gradients, 1.0 / scale, out=out)
    else:
        torch.add(kept, gradients, alpha=1.0 / scale, out=out)


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
    from paceline.parallel.sync.casts import DTYPES, CastCompression, Int8Compression
    from paceline.parallel.sync.powersgd import PowerSGD

    if section.compress == "powersgd":
        return PowerSGD(exchange, **section.model_dump(include={"rank", "start", "min_ratio", "warm_start"}))
    if section.compress == "int8":
        return Int8Compression(exchange)
    assert section.compress is not None
    return CastCompression(exchange, DTYPES[section.compress])
