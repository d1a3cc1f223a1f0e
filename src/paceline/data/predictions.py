"""The outputs for all samples, assembled from the batches of all ranks in the order of the data.

Outputs are tensors with samples along the first dim, or lists of one item per sample, nested in tuples, lists and
dicts. Rows of one shape are concatenated to a tensor. Where their shapes differ, because batches are padded to their
own length or a detector finds another number of boxes, the result is a list of one item per sample.

Rows are what a metric needs as a whole: tensors nested in tuples, lists and dicts, with samples along the first dim.
They are gathered in blocks, so that the device never holds more than a block of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.data.batches import apply, samples_in, tensors_in
from paceline.data.loader import no_samples
from paceline.errors import TrainError, WorldError
from paceline.runtime import collectives
from paceline.runtime.collectives import Group

Column = list[Any]  # one part of the outputs: a tensor, or a list of items, for every batch
_PLAIN = (bool, int, float, str, type(None))
_BLOCK_BYTES = 64 << 20  # of one rank


def gather_outputs(batches: list[tuple[Any, int]], positions: list[int], device: torch.device) -> Any:
    """Gather (outputs, samples) of each batch on the CPU of every rank. `positions` are those of the samples in the
    data. Collective: must be called on every rank."""
    readings = [_read(batches, is_items) for is_items in _READINGS]
    own = {"readings": [[each.structure, each.problem, each.kinds] for each in readings], "positions": positions}
    reports = collectives.all_gather_object(own)
    known = [report["readings"] for report in reports if report["positions"]]
    if not known:
        raise no_samples()
    chosen = _choose([[rank[number] for rank in known] for number in range(len(_READINGS))])
    columns, structure = readings[chosen].columns, known[0][chosen][0]
    order = torch.tensor([place for report in reports for place in report["positions"]]).argsort()
    counts = [len(report["positions"]) for report in reports]
    results: list[Any] = []
    for number, kind in enumerate(known[0][chosen][2]):
        column = columns[number] if batches else []
        if kind is not None and all(rank[chosen][2][number] == kind for rank in known):
            dtype, shape = kind
            rows = torch.cat(column) if column else torch.empty((0, *shape), dtype=getattr(torch, dtype))
            results.append(gather_rows(rows, counts, device, keeps=True)[order])
        else:
            items = _gather_items([item for part in column for item in part], device)
            results.append([items[place] for place in order.tolist()])
    return _restore(structure, results.__getitem__, batches[0][0] if batches else None)


class _Reading(NamedTuple):
    """The structure of this rank's outputs, their parts, and what is wrong with them."""

    structure: Any
    columns: list[Column]
    problem: str = ""

    @property
    def kinds(self) -> list[Any]:
        return [_kind(column) for column in self.columns]


def _read(batches: list[tuple[Any, int]], is_items: Callable[[list[Any], int], bool]) -> _Reading:
    structure: Any = None
    columns: list[Column] = []
    for outputs, samples in batches:
        parts: list[Any] = []
        try:
            found = _describe(outputs, partial(_as_part, samples=samples, parts=parts, is_items=is_items))
            for part in parts:
                _encode_items(part if isinstance(part, list) else [], [])
        except _BadOutputError as error:
            return _Reading(None, [], str(error))
        if columns and found != structure:
            return _Reading(None, [], "batches have outputs of different structure")
        structure = found
        columns = columns or [[] for _ in parts]
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    return _Reading(structure, columns)


def _choose(readings: list[list[Any]]) -> int:
    """The first reading that fits the outputs of all ranks. `readings` has (structure, problem, kinds) of each rank."""
    problems = []
    for number, ranks in enumerate(readings):
        own = [problem for _, problem, _ in ranks if problem]
        if not own and all(structure == ranks[0][0] for structure, _, _ in ranks):
            return number
        problems += own or ["ranks have outputs of different structure"]
    raise TrainError("bad-outputs", f"The outputs can't be assigned to samples: {problems[0]}.")


class _BadOutputError(Exception):
    """What is wrong with an output, for the error that all ranks raise."""


def _as_part(value: Any, samples: int, parts: list[Any], is_items: Callable[[list[Any], int], bool]) -> int | None:
    """Add `value` to the parts if it has a row or an item for each sample. Returns its number; None: look inside."""
    if isinstance(value, Tensor):
        if not value.dim() or len(value) != samples:
            raise _BadOutputError(f"a batch of {samples} samples has an output of shape {tuple(value.shape)}")
    elif not isinstance(value, list) or len(value) != samples or not is_items(value, samples):
        return None
    parts.append(value)
    return len(parts) - 1


def _has_no_rows(items: list[Any], samples: int) -> bool:
    """Whether the list has dicts, or tensors without samples along the first dim. Their sizes may agree by chance."""
    return any(not isinstance(item, Tensor) or not item.dim() or len(item) != samples for item in items)


# Lists have no items of samples; some have, by what is in them; all have if they are as long as the batch.
_READINGS: list[Callable[[list[Any], int], bool]] = [lambda *_: False, _has_no_rows, lambda *_: True]


def _kind(column: Column) -> list[Any] | None:
    """The dtype and the shape of a row, as plain values; None if rows differ or are no tensors."""
    if not all(isinstance(part, Tensor) for part in column):
        return None
    kinds = kinds_of(column)
    return kinds[0] if all(kind == kinds[0] for kind in kinds) else None


def _gather_items(items: list[Any], device: torch.device) -> list[Any]:
    """The items of all ranks, rank by rank."""
    tensors: list[Tensor] = []
    encoded = _encode_items(items, tensors)
    flat = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    data = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    reports = collectives.all_gather_object({"items": encoded, "bytes": len(data)})
    received = gather_rows(data, [report["bytes"] for report in reports], device, keeps=True)
    place = 0

    def take(kind: list[Any]) -> Tensor:
        nonlocal place
        dtype, shape = getattr(torch, kind[0]), torch.Size(kind[1])
        begin, place = place, place + shape.numel() * dtype.itemsize
        # Copied: the bytes of a tensor need not be aligned to its dtype, and would keep all others alive.
        return received[begin:place].clone().view(dtype).reshape(shape)

    return [_restore(item, take) for report in reports for item in report["items"]]


def _encode_items(items: list[Any], tensors: list[Tensor]) -> list[Any]:
    """The items as plain values; their tensors are added to `tensors`."""

    def leaf(value: Any) -> list[Any] | None:
        if not isinstance(value, Tensor):
            return None
        tensors.append(value)
        return [str(value.dtype).removeprefix("torch."), list(value.shape)]

    return [_describe(item, leaf) for item in items]


def _describe(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Containers as plain values. `leaf` returns the description of a leaf, and None for other values."""
    found = leaf(value)
    if found is not None:
        return {"leaf": found}
    if isinstance(value, Mapping):
        return {"dict": [[_describe(key, leaf), _describe(inner, leaf)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_describe(inner, leaf) for inner in value]}
    if isinstance(value, _PLAIN):
        return {"value": value}
    raise _BadOutputError(f"they contain a {type(value).__module__}.{type(value).__qualname__}")


def _restore(described: Any, leaf: Callable[[Any], Any], like: Any = None) -> Any:
    """The inverse of `_describe`. Named tuples get the class of `like`."""
    [(kind, content)] = described.items()
    if kind == "leaf":
        return leaf(content)
    if kind == "value":
        return content
    if kind == "dict":
        pairs = [(_restore(key, leaf), inner) for key, inner in content]
        inside = like if isinstance(like, Mapping) else {}
        return {key: _restore(inner, leaf, inside.get(key)) for key, inner in pairs}
    parts = like if isinstance(like, (list, tuple)) else [None] * len(content)
    values = [_restore(inner, leaf, part) for inner, part in zip(content, parts, strict=True)]
    if kind == "tuple":
        return type(like)(*values) if hasattr(like, "_fields") else tuple(values)
    return values


def gather_in_order(local: list[Any], positions: list[int], device: torch.device, *, dst: int) -> Any:
    """Gather the rows of all ranks on the CPU of rank `dst`, which must have some, ordered by their position in the
    data; None on other ranks. Collective: must be called on every rank."""
    flat = [torch.cat(rows) for rows in zip(*(list(tensors_in(part)) for part in local), strict=True)]
    reports = collectives.all_gather_object({"positions": positions, "kinds": kinds_of(flat)})
    counts = [len(report["positions"]) for report in reports]
    order = torch.tensor([place for report in reports for place in report["positions"]]).argsort()
    keeps = dst == collectives.rank()
    gathered = []
    for number, (dtype, shape) in enumerate(reports[dst]["kinds"]):
        own = flat[number] if local else torch.empty((0, *shape), dtype=getattr(torch, dtype))
        rows = gather_rows(own, counts, device, keeps=keeps)
        if keeps:
            gathered.append(rows[order])
    tensors = iter(gathered)
    return apply(local[0], lambda _: next(tensors)) if keeps else None


def kinds_of(tensors: list[Tensor]) -> list[list[Any]]:
    """The dtype and the shape of a row of each tensor, as plain values."""
    return [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape[1:])] for tensor in tensors]


def gather_rows(own: Tensor, counts: list[int], device: torch.device, *, keeps: bool) -> Tensor:
    """The rows of all ranks, rank by rank. `counts` is the number of rows of each."""
    row_bytes = max(1, own.shape[1:].numel() * own.element_size())
    block = max(1, _BLOCK_BYTES // row_bytes)
    parts: list[list[Tensor]] = [[] for _ in counts]
    for start in range(0, max(counts), block):
        length = min(block, max(counts) - start)
        padded = torch.zeros((length, *own.shape[1:]), dtype=own.dtype, device=device)
        mine = own[start : start + length]
        padded[: len(mine)] = mine.to(device)
        received = [torch.empty_like(padded) for _ in counts]
        collectives.all_gather(received, padded)
        if keeps:
            for rows, block_rows, count in zip(parts, received, counts, strict=True):
                rows.append(block_rows[: max(0, count - start)].cpu())
    return torch.cat([block_rows for rows in parts for block_rows in rows]) if keeps else own


class CollectedRows:
    """Outputs and targets of this rank, in host memory, as long as those of all `ranks` fit into `max_bytes`."""

    def __init__(self, ranks: int, samples: int | None, max_bytes: int) -> None:
        self._ranks, self._samples, self._max_bytes = ranks, samples or 0, max_bytes
        self.parts: list[Any] = []
        self.positions: list[int] = []
        self._bytes = 0
        self._kinds: list[list[Any]] | None = None
        self._why_not = ""

    def drop(self, why: str) -> None:
        """Keep nothing: not all rows are known."""
        self.parts, self.positions, self._why_not = [], [], why

    def take(self) -> list[tuple[Any, int]]:
        """The batches kept until now, with their samples, which are not kept any longer."""
        taken, self.parts = [(part, samples_in(part)) for part in self.parts], []
        return taken

    def keep(self, rows: Any, samples: int, first: int) -> bool:
        self._why_not = self._why_not or self._obstacle(rows, samples)
        if self._why_not:
            return False
        self.parts.append(apply(rows, lambda tensor: tensor.detach().to("cpu", copy=True)))
        self.positions.extend(range(first, first + samples))
        return True

    def _obstacle(self, rows: Any, samples: int) -> str:
        if other := _not_rows(rows, samples):
            return other
        tensors = list(tensors_in(rows))
        kinds = kinds_of(tensors)
        if self._kinds is None:
            self._kinds = kinds
        elif kinds != self._kinds:
            return "outputs or targets have another shape in every batch"
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._bytes += size
        expected = max(self._bytes * self._ranks, size // samples * self._samples)
        return "outputs and targets take more than 1 GiB" if expected > self._max_bytes else ""

    def report(self) -> dict[str, Any]:
        return {"rows": len(self.positions), "why_not": self._why_not, "row_kinds": self._kinds}


def _not_rows(value: Any, samples: int) -> str:
    """Why `value` can't be concatenated by samples; empty if it can."""
    if isinstance(value, Tensor):
        return "" if value.dim() and len(value) == samples else "outputs or targets have no dim of samples"
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((why for part in value if (why := _not_rows(part, samples))), "")
    return "" if value is None else f"outputs or targets contain a {type(value).__name__}"


def why_not_gathered(reports: list[dict[str, Any]]) -> str:
    """Why rows can't be gathered, equal on every rank; empty if they can."""
    given = [report["why_not"] for report in reports if report["why_not"]]
    kinds = [report["row_kinds"] for report in reports if report["row_kinds"]]
    if not given and any(each != kinds[0] for each in kinds):
        return "outputs or targets have another shape on every rank"
    return given[0] if given else ""


def all_gather_rows(tensor: Tensor, group: Group = None) -> Tensor:
    """Concatenate the tensors of all ranks along the first dim, in rank order.

    Ranks may have different numbers of rows, also none. The gradient of a row is summed over ranks, and goes back to
    the rank that the row came from. If every rank computes the same loss from all rows, this sum is the world size
    times its gradient, which the average over data ranks cancels. Collective, and so is its backward.

    Args:
        tensor: with at least one dim; dims after the first, and the dtype, are the same on every rank
        group: a process group of torch.distributed; default: all ranks

    Returns:
        The rows of all ranks.

    Raises:
        WorldError: `world.not-a-tensor`, `world.different-collectives`

    Example:
        >>> features = torch.ones(dist.rank() + 1, 3)
        >>> len(dist.all_gather_rows(features)) == sum(range(1, dist.world() + 1))
        True
    """
    if not tensor.dim():
        raise WorldError(
            "not-a-tensor",
            "all_gather_rows() got a tensor without dims.",
            fix="pass a tensor with rows along its first dim, e.g. tensor.reshape(1)",
        )
    kinds = collectives.all_gather_object([list(tensor.shape), str(tensor.dtype)], group)
    if len({(tuple(shape[1:]), dtype) for shape, dtype in kinds}) > 1:
        raise WorldError(
            "different-collectives",
            f"all_gather_rows() got tensors of shape and dtype {', '.join(f'{tuple(s)} {d}' for s, d in kinds)}.",
            why="only the first dim may differ between ranks",
            fix="pad the other dims to one size, and convert to one dtype",
        )
    if len(kinds) == 1:
        return tensor
    index = collectives.rank() if group is None else torch.distributed.get_rank(group)
    rows: Tensor = _Gather.apply(tensor, [shape[0] for shape, _ in kinds], index, group)
    return rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, counts: list[int], index: int, group: Group) -> Tensor:
        context.start, context.count, context.group = sum(counts[:index]), counts[index], group
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: counts[index]] = tensor
        received = [torch.empty_like(padded) for _ in counts]
        collectives.all_gather(received, padded, group)
        return torch.cat([rows[:count] for rows, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = gradients[0].contiguous().clone()
        collectives.all_reduce(total, group=context.group)
        return total[context.start : context.start + context.count], None, None, None
