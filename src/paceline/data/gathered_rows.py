"""Rows of all ranks, in the order of the data: predictions, and the outputs that a metric needs as a whole.

Rows are tensors nested in tuples, lists and dicts, with samples along the first dim. They are gathered in blocks, so
that the device never holds more than a block of every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.data.batches import apply, samples_in, tensors_in
from paceline.runtime import collectives

_BLOCK_BYTES = 64 << 20  # of one rank
_TENSOR = "<tensor>"  # marks the place of a tensor for ranks without rows


def gather_in_order(local: list[Any], positions: list[int], device: torch.device, *, dst: int | None = None) -> Any:
    """Gather the rows of all ranks on the CPU of every rank, ordered by their position in the data. With `dst`, only
    that rank gets them. Collective: must be called on every rank, and at least one must have rows."""
    skeletons = collectives.all_gather_object([apply(local[0], _to_mark)] if local else [])
    like = local[0] if local else next(skeleton[0] for skeleton in skeletons if skeleton)
    flat = [torch.cat(rows) for rows in zip(*(list(tensors_in(part)) for part in local), strict=True)]
    shapes = collectives.all_gather_object({"positions": positions, "kinds": kinds_of(flat)})
    counts = [len(rank["positions"]) for rank in shapes]
    kinds = next(rank["kinds"] for rank in shapes if rank["positions"])
    order = torch.tensor([place for rank in shapes for place in rank["positions"]]).argsort()
    keeps = dst is None or dst == collectives.rank()
    gathered = []
    for number, (dtype, shape) in enumerate(kinds):
        own = flat[number] if local else torch.empty((0, *shape), dtype=getattr(torch, dtype))
        rows = gather_rows(own, counts, device, keeps=keeps)
        if keeps:
            gathered.append(rows[order])
    return _refill(like, iter(gathered)) if keeps else None


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


def _to_mark(tensor: Tensor) -> Any:
    return _TENSOR


def _refill(like: Any, tensors: Iterator[Tensor]) -> Any:
    """Fill `tensors` into the structure of the rows. On a rank without samples `like` has marks for tensors."""
    if isinstance(like, str) and like == _TENSOR:
        return next(tensors)
    if next(tensors_in(like), None) is not None:
        return apply(like, lambda _: next(tensors))
    if isinstance(like, Mapping):
        return {key: _refill(part, tensors) for key, part in like.items()}
    return [_refill(part, tensors) for part in like] if isinstance(like, (list, tuple)) else like


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
        other = _not_rows(rows, samples)
        if other:
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
