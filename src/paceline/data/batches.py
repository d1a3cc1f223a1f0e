"""Batches: tensors nested in tuples, lists and dicts, with samples along the first dim; and their way to the device.

A list inside a batch may also have one item per sample, as detection models expect: ([image, …], [{"boxes": …}, …]).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

import numpy as np
import torch

from paceline.errors import DataError

if TYPE_CHECKING:
    from paceline.data.loader import MicroBatch

_SHOWN = 8
_SKETCHED = 64  # values, or characters
_LARGE = 1 << 18  # elements; larger tensors are no masks, and take time
# Bytes of a tensor that are copied on the compute stream: CUDA takes up to 64 KiB at once, even from pageable memory,
# and switching streams takes longer than such a copy.
_ON_COMPUTE_STREAM = 1 << 16
_ORDERED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64}
# What a batch is made of: parts whose first dim is the batch; the same, with lists of one item per sample inside; or a
# list of samples.
Kind = Literal["parts", "lists", "items"]
Changes = Sequence[Callable[[torch.Tensor], torch.Tensor]]


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor))


def floors(batch: Any) -> dict[int, float]:
    """Of each tensor on the CPU, by its number: the least value of integers and bools; 0 if a float is 0, else 1. Where
    masks or ignored targets begin, one of them falls."""
    found = {}
    for number, tensor in enumerate(tensors_in(batch)):
        plain = tensor.dtype in _ORDERED and tensor.layout is torch.strided and not tensor.is_nested
        if plain and tensor.device.type == "cpu" and 0 < tensor.numel() <= _LARGE:
            found[number] = float((tensor != 0 if tensor.is_floating_point() else tensor).min())
    return found


def samples_in(batch: Any, like: Kind | None = None) -> int:
    """The number of samples in a batch; the first dim of its first tensor if its parts disagree."""
    if _is_flat(batch):
        return int(batch[0].size(0))  # fast path for the common case
    known = layout_of(batch, like)
    if known is not None:
        return known[0]
    for tensor in tensors_in(batch):
        if tensor.dim():
            return tensor.shape[0]
    raise DataError("no-length", f"A batch of type {type(batch).__name__} contains no tensor with a batch dim.")


def _is_flat(batch: Any) -> bool:
    """Whether this is a tuple or list of tensors."""
    if type(batch) not in (tuple, list):
        return False
    for part in batch:  # not all(…): a generator takes one more call for each part
        if type(part) is not torch.Tensor or not part.dim():
            return False
    return len(batch) > 0


def layout_of(batch: Any, like: Kind | None = None) -> tuple[int, Kind] | None:
    """The number of samples in a batch and what it is made of; None if its parts disagree, or if there are two ways to
    read it. `like`: what earlier batches of the same data are made of."""
    if like is not None and (length := _agreed(batch, like)) is not None:
        return length, like
    if type(batch) is dict and _is_flat(list(batch.values())):
        lengths = {tensor.shape[0] for tensor in batch.values()}
        return (lengths.pop(), "parts") if len(lengths) == 1 else None
    kinds: tuple[Kind, ...] = ("parts", "lists", "items")
    if type(batch) is list and all(map(_is_sample, batch)):  # `collate_fn=list`
        kinds = ("items",)
    found = {kind: length for kind in kinds if (length := _agreed(batch, kind)) is not None}
    return next((length, kind) for kind, length in found.items()) if len(set(found.values())) == 1 else None


def _agreed(batch: Any, kind: Kind) -> int | None:
    """The number of samples on which all parts agree, for a batch of this kind."""
    if kind == "items":
        similar = type(batch) is list and len({_keys(item) for item in batch}) == 1 and _keys(batch[0]) is not None
        return len(batch) if similar else None
    parts = list(_parts(batch, kind == "lists"))
    if kind == "lists" and all(isinstance(part, torch.Tensor) for _, part in parts):
        return None  # there are no lists in it
    found = {len(part) for _, part in parts}
    return found.pop() if len(found) == 1 else None


def _is_sample(item: Any) -> bool:
    """Whether this was not collated: default_collate returns no tuples, and neither numbers nor strings in dicts."""
    if isinstance(item, Mapping):
        return any(isinstance(value, (int, float, str)) for value in item.values())
    return type(item) is tuple


def _keys(item: Any) -> tuple[Any, ...] | None:
    if type(item) is tuple:
        return (len(item),)
    return tuple(item) if isinstance(item, Mapping) else None


def _parts(batch: Any, lists: bool, path: str = "") -> Iterator[tuple[str, Any]]:
    """The path of every tensor with dims. With `lists`, a list of tensors or dicts inside the batch is one part."""
    if isinstance(batch, torch.Tensor):
        if batch.dim():
            yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _parts(value, lists, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        if lists and path and _holds_samples(batch):
            yield path, batch
        else:
            for index, value in enumerate(batch):
                yield from _parts(value, lists, f"{path}[{index}]")


def _holds_samples(batch: Any) -> bool:
    return not hasattr(batch, "_fields") and next(tensors_in(batch), None) is not None


def shapes_of(batch: Any) -> str:
    shapes = [f"batch{path} {tuple(part.shape)}" for path, part in _parts(batch, lists=False)]
    return ", ".join(shapes[:_SHOWN]) + (", …" if len(shapes) > _SHOWN else "")


def apply(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply `change` to every tensor, keeping the containers."""
    kind = type(batch)
    if kind is tuple or kind is list:  # the common case, with few calls
        return kind([change(part) if type(part) is torch.Tensor else apply(part, change) for part in batch])
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return _like(batch, {key: apply(value, change) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        return _like(batch, [apply(value, change) for value in batch])
    return batch


def digest(batch: Any) -> int:
    """A checksum of the tensors in a batch."""
    total = 0
    for tensor in tensors_in(batch):
        bits = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        total = crc32(bits.numpy().tobytes(), total)
    return total


def comparable(sample: Any) -> int:
    """A sketch that may be compared between ranks. Text counts only if there is nothing else, because it may contain
    paths, which differ between nodes."""
    numbers = any(isinstance(value, (torch.Tensor, np.ndarray, int, float)) for value in _leaves(sample))
    return sketch(sample, text=not numbers)


def sketch(sample: Any, *, text: bool = True) -> int:
    """A checksum of a few values of a sample or batch: cheap, and different for different samples."""
    total = 0
    for value in _leaves(sample):
        array = value.detach() if isinstance(value, torch.Tensor) else value
        if isinstance(array, (torch.Tensor, np.ndarray)):
            total = crc32(repr(tuple(array.shape)).encode(), total)
            if isinstance(array, torch.Tensor) and array.device.type != "cpu":
                continue  # reading it would synchronize with the device
            flat = array.reshape(-1)
            some: Any = flat[:: max(1, len(flat) // _SKETCHED)]
            some = some.contiguous().view(torch.uint8).numpy() if isinstance(some, torch.Tensor) else some
            total = crc32(some.tobytes(), total)
        elif isinstance(value, (int, float)):
            total = crc32(repr(value).encode(), total)
        elif isinstance(value, (str, bytes)):
            total = crc32(repr(value[:_SKETCHED]).encode(), total) if text else total
        elif callable(getattr(value, "tobytes", None)):  # an image, for example
            total = crc32(value.tobytes(), total)
    return total


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def rows_of(batch: Any, start: int, stop: int, like: Kind | None = None, samples: int | None = None) -> Any:
    """Slice a batch of `samples` samples; None: as many as it seems to have. Scalars, and values of other types than
    tensors, are kept as they are."""
    if samples is None and _is_flat(batch):
        length = batch[0].shape[0]
        if all(part.shape[0] == length for part in batch):  # fast path for the common case
            return type(batch)([part[start:stop] for part in batch])
    known = layout_of(batch, like)
    if known is None or samples not in (None, known[0]):
        raise DataError(
            "batch-dim", f"This batch has to be sliced, but its number of samples is unclear: {shapes_of(batch)}."
        )
    length, kind = known
    if (start, stop) == (0, length):
        return batch
    return batch[start:stop] if kind == "items" else _rows(batch, start, stop, length, kind)


def _rows(batch: Any, start: int, stop: int, length: int, kind: Kind, top: bool = True) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[start:stop] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return _like(batch, {key: _rows(value, start, stop, length, kind, False) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        nested = next(tensors_in(batch), None) is not None
        if nested and (top or kind == "parts" or not _holds_samples(batch)):
            return _like(batch, [_rows(value, start, stop, length, kind, False) for value in batch])
        return batch[start:stop] if len(batch) == length else batch  # one item per sample, or metadata
    return batch


def _like(batch: Any, values: Any) -> Any:
    """A container of the same type with other values."""
    if isinstance(batch, Mapping):
        if not hasattr(batch, "__setitem__"):
            return values
        same_kind = copy.copy(batch)
        for key, value in values.items():
            same_kind[key] = value
        return same_kind
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def to_device(micros: Iterator[MicroBatch], device: torch.device, changes: Changes) -> Iterator[MicroBatch]:
    """Each micro-batch on `device`, with `changes` applied to its tensors, one after the other. Large ones are copied
    to a GPU one step ahead, on a side stream, to overlap copies with compute."""
    if device.type == "cuda":
        return _prefetched(micros, device, changes)
    if device.type == "cpu" and not changes:
        return micros  # already there
    return _moved(micros, device, changes)


def _moved(micros: Iterator[MicroBatch], device: torch.device, changes: Changes) -> Iterator[MicroBatch]:
    for micro in micros:
        micro.batch = apply(micro.batch, lambda tensor: _changed(tensor.to(device), changes))
        yield micro


def _changed(tensor: torch.Tensor, changes: Changes) -> torch.Tensor:
    for change in changes:
        tensor = change(tensor)
    return tensor


def _prefetched(micros: Iterator[MicroBatch], device: torch.device, changes: Changes) -> Iterator[MicroBatch]:
    side, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    copied: list[torch.Tensor] = []  # of one micro-batch, on the side stream
    ahead: tuple[MicroBatch, list[torch.Tensor], torch.cuda.Event] | None = None

    def put(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device or tensor.nbytes <= _ON_COMPUTE_STREAM:
            return _changed(tensor.to(device, non_blocking=True), changes)
        with torch.cuda.stream(side):
            copied.append(_changed(tensor.to(device, non_blocking=True), changes))
        return copied[-1]

    for micro in micros:
        copied = []
        if changes or not _is_flat_on(device, micro.batch):
            micro.batch = apply(micro.batch, put)
        done = side.record_event() if copied else None
        if ahead is not None:
            yield _arrived(*ahead, compute)
        ahead = None if done is None else (micro, copied, done)
        if ahead is None:
            yield micro
    if ahead is not None:
        yield _arrived(*ahead, compute)


def _is_flat_on(device: torch.device, batch: Any) -> bool:
    """Whether this is a tuple or list of tensors on the device."""
    parts = batch if type(batch) in (tuple, list) else ()
    return {part.device if type(part) is torch.Tensor else None for part in parts} == {device}


def _arrived(
    micro: MicroBatch, copied: list[torch.Tensor], done: torch.cuda.Event, compute: torch.cuda.Stream
) -> MicroBatch:
    """Make the compute stream wait for this copy only, and record its use of the memory for the allocator."""
    compute.wait_event(done)
    for tensor in copied:
        tensor.record_stream(compute)
    return micro
