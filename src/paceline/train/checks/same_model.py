"""Compares what ranks train: its structure before a wrapper moves data, the weights of replicas at log points.

Only gradients are reduced, so replicas that differ once stay different, and the loss hardly shows it. A digest of the
weights' bits rides in the reduction of a log point: with x the digest of each of n ranks, n·Σx² = (Σx)² only if all are
equal. Its cost is bounded: a check covers a limited number of bytes, the next one continues after them, and rank 0
asks for the next one when a hundred times the duration of the last has passed. With local steps, in which replicas
have the same weights after a round only, the digest is taken then.

DDP and FSDP take for granted that every rank has the same parameters in the same order. If not, they hang, abort or
mix parameters. So ranks exchange a digest first, and the details only if it differs.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batches import tensors_in
from paceline.errors import DataError, TrainError, WorldError
from paceline.models.weights import checksum, column_sums, mixed
from paceline.parallel.optimizer_binding import names_of
from paceline.parallel.shards import local_shard
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.text import by_rank, numbered, plural

_BITS = 20  # the sum of squares over 8,192 ranks is exact in float64
_BYTES, _GPU_BYTES = 64 << 20, 1 << 30  # of weights in one check
_AT_THE_END = 16  # times as many in the check after the last step
_SHARE = 100  # a check takes at most this part of the time
Part = tuple[Tensor, int, int]  # a range of elements
Facts = list[tuple[str, str]]  # (what, its description), in the order in which collectives use them


def require_same_model(model: nn.Module, optimizer: torch.optim.Optimizer | None, criterion: Any) -> None:
    """Raise unless all ranks have the same modules, parameters, buffers and optimizer. Collective."""
    if collectives.world() == 1:
        return
    found = _first_difference([*_model_facts(model), *_optimizer_facts(model, optimizer), *_criterion_facts(criterion)])
    if found is not None:
        raise WorldError("different-models", f"Ranks have different models, first:\n{by_rank(found)}")


def require_same_structure(batch: Any) -> None:
    """Raise unless the batches of all ranks have the same keys, and tensors of the same kind. Collective."""
    found = _first_difference(list(_structure(batch, "batch")))
    if found is not None:
        raise DataError(
            "different-structure", f"Ranks received batches of different structure, first:\n{by_rank(found)}"
        )


def _first_difference(facts: Facts) -> list[str] | None:
    """The first fact that differs, as each rank has it."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if len(set(collectives.all_gather_object(digest))) == 1:
        return None
    for rows in zip_longest(*collectives.all_gather_object(facts)):
        if any(row != rows[0] for row in rows):
            return ["(nothing)" if row is None else " ".join(row).rstrip() for row in rows]
    return None


def _model_facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, parameter in model.named_parameters():
        trained = "" if parameter.requires_grad else ", frozen"
        yield f"parameter {name}:", f"{_describe(parameter)}{trained}"
    yield "no other parameter", ""
    for name, buffer in model.named_buffers():
        yield f"buffer {name}:", _describe(buffer)
    yield "no other buffer", ""
    for name, module in model.named_modules():
        yield f"module {name or '(the model)'}:", type(module).__qualname__


def _optimizer_facts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, str]]:
    if optimizer is None:
        return
    names = names_of(model.named_parameters())
    yield "optimizer:", type(optimizer).__qualname__
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: _setting(value) for key, value in group.items() if key != "params"}
        yield f"optimizer group {number}:", ", ".join(f"{key}={value}" for key, value in settings.items())
        for parameter in group["params"]:
            yield f"optimizer group {number} parameter:", names.get(id(parameter), "(not in the model)")


def _criterion_facts(criterion: Any) -> Iterator[tuple[str, str]]:
    if criterion is not None:
        yield "criterion:", type(criterion).__qualname__


def _setting(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.tolist()) if value.numel() == 1 else _describe(value)
    return repr(value) if isinstance(value, (bool, int, float, str, tuple, list, type(None))) else type(value).__name__


def _structure(batch: Any, where: str) -> Iterator[tuple[str, str]]:
    """Shapes and the lengths of lists are left out: they may depend on the samples."""
    if isinstance(batch, Tensor):
        yield f"{where}:", f"tensor with {batch.dim()} dims, {_dtype(batch)}"
    elif isinstance(batch, Mapping):
        yield f"{where}:", f"keys {', '.join(map(str, batch))}"
        for key, value in batch.items():
            yield from _structure(value, f"{where}[{key!r}]")
    elif isinstance(batch, tuple) or (isinstance(batch, list) and len({type(each) for each in batch}) > 1):
        yield f"{where}:", f"{type(batch).__name__} of {len(batch)}"
        for number, value in enumerate(batch):
            yield from _structure(value, f"{where}[{number}]")
    elif isinstance(batch, list) and batch and any(True for _ in tensors_in(batch)):
        yield from _structure(batch[0], f"{where}[0]")


def _describe(tensor: Tensor) -> str:
    return f"{'×'.join(map(str, tensor.shape)) or 'scalar'}, {_dtype(tensor)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class ReplicaCheck:
    """`may_differ`: whether replicas may have different weights now."""

    def __init__(self, model: nn.Module, mesh: Mesh, may_differ: Callable[[], bool]) -> None:
        self._parameters, self._may_differ = dict(model.named_parameters()), may_differ
        self._after_round: Tensor | None = None  # the digest then
        self._mesh, self._replicas = mesh, mesh.degrees.replicate
        # If every rank is a replica, the reduction of the log point compares them all.
        self._group: Any = None if mesh.degrees.is_replicated else mesh.group("replicate")
        self._windows = _windows(list(self._parameters.values()))
        self._good: list[int | None] = [None] * len(self._windows)  # the step of the last check that passed
        self._window, self._due = 0, bool(self._windows)
        self._checked, self._cost = -math.inf, 0.0
        self._timers: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def digest(self) -> Tensor | None:
        """The digest of the next weights if a check is due. Stays on the device."""
        digest, self._after_round = self._after_round, None
        if digest is None and self._due and not self._may_differ():
            digest = self._digest(self._windows[self._window])
        self._taken = digest is not None
        return digest

    def after_round(self) -> None:
        """Take the digest for the next log point, at which replicas may have other weights again."""
        if self._due and self._after_round is None:
            self._after_round = self._digest(self._windows[self._window])

    def shares(self, digest: Tensor | None) -> list[float]:
        """This rank's numbers in a sum over all ranks: digest, its square, whether replicas differ, and the wish for
        another check."""
        if digest is None:
            wished = time.perf_counter() - self._checked >= _SHARE * self._cost
            return [0.0, 0.0, 0.0, float(wished and bool(self._windows) and collectives.is_main())]
        began = time.perf_counter()
        own = [float(digest), float(digest) ** 2]
        if self._timers is not None:
            self._cost += self._timers[0].elapsed_time(self._timers[1]) / 1000
        if self._group is None:
            return [*own, 0.0, 0.0]
        sums = torch.tensor(own, dtype=torch.float64, device=self._mesh.device)
        collectives.all_reduce(sums, group=self._group)
        self._checked = time.perf_counter()
        self._cost += self._checked - began
        return [0.0, 0.0, float(not _equal(sums.tolist(), self._replicas)), 0.0]

    def finish(self, sums: Sequence[float], step: int, *, finite: bool) -> None:
        """Take the sums of all ranks after `step`. Raises if replicas differ, unless the step is not `finite`, which
        ranks may have handled differently."""
        self._due = sums[3] > 0 or (self._due and not self._taken)
        if not self._taken:
            return
        if finite:
            if sums[2] or not _equal(sums[:2], self._replicas if self._group is None else 1):
                self._raise_first_difference(step)
            self._good[self._window] = step
        self._window = (self._window + 1) % len(self._windows)

    def check_all(self, step: int) -> None:
        """Check all weights after the last step, or as many as a moment allows. Collective."""
        if self._may_differ() or not self._windows or all(good == step for good in self._good):
            return
        order = [(self._window + index) % len(self._windows) for index in range(len(self._windows))][:_AT_THE_END]
        shares = self.shares(self._digest([part for window in order for part in self._windows[window]]))
        sums = torch.tensor(shares, dtype=torch.float64, device=self._mesh.device)
        collectives.all_reduce(sums)
        values = sums.tolist()
        if values[2] or not _equal(values[:2], self._replicas if self._group is None else 1):
            self._raise_first_difference(step)
        for window in order:
            self._good[window] = step

    def _digest(self, parts: Sequence[Part]) -> Tensor:
        began, device = time.perf_counter(), self._mesh.device
        if device.type == "cuda":
            self._timers = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._timers[0].record()
        sums = [each for tensor, start, stop in parts for each in column_sums(_elements(tensor, start, stop))]
        digest = mixed(sums, device) >> (64 - _BITS) & (1 << _BITS) - 1
        if self._timers is not None:
            self._timers[1].record()
        self._checked = time.perf_counter()
        self._cost = self._checked - began
        return digest

    def _raise_first_difference(self, step: int) -> None:
        if self._may_differ():  # by now, rightly so
            raise TrainError(
                "replicas-differ",
                f"After the last round before step {step}, replicas had different weights.",
                why="a round gives them the same bits, except for frozen parameters that are changed through .data",
                fix="change frozen parameters under torch.no_grad(); preflight=False disables this check",
            )
        own = {name: _checksum_if_finite(parameter) for name, parameter in self._parameters.items()}
        place = {axis: coord for axis, coord in self._mesh.coords.items() if axis != "replicate"}
        groups: dict[str, dict[int, dict[str, str | None]]] = {}
        for rank, (where, values) in enumerate(collectives.all_gather_object([str(place), own])):
            groups.setdefault(where, {})[rank] = values
        found = [
            (name, {rank: str(values[name]) for rank, values in members.items()})
            for members in groups.values()
            for name in next(iter(members.values()))
            if len({values[name] for values in members.values()}) > 1 and all(v[name] for v in members.values())
        ]
        if found:
            name, by_rank = found[0]
            raise _error(name, len(found) - 1, by_rank, self._last_good(name), step)

    def _last_good(self, name: str) -> int | None:
        """The step of the last check in which this parameter was equal."""
        parameter = self._parameters.get(name)  # another stage of a pipeline may hold it
        steps = [
            good
            for window, good in zip(self._windows, self._good, strict=True)
            if any(part[0] is parameter for part in window)
        ]
        return min((good for good in steps if good is not None), default=None) if None not in steps else None


def _error(name: str, others: int, by_rank: dict[int, str], good: int | None, step: int) -> TrainError:
    values = sorted(set(by_rank.values()), key=list(by_rank.values()).index)
    table = [
        f"    {numbered('rank', [rank for rank, own in by_rank.items() if own == value])}: checksum {value}"
        for value in values
    ]
    more = f" and {plural(others, 'other parameter')}" if others else ""
    before = "" if good is None else f" They were equal after step {good}."
    return TrainError(
        "replicas-differ",
        f"After step {step}, replicas hold different weights: {name}{more}.{before}\n" + "\n".join(table),
        why="only gradients are reduced, so weights that change on some ranks only stay different: through a callback, "
        "a forward that changes parameters, hooks on gradients, your own optimizer.step(), or a comm_hook",
        fix="change parameters identically on every rank, and not inside `if trainer.is_main_process:`; resume from a "
        "checkpoint before that step; preflight=False disables this check",
    )


def _equal(sums: Sequence[float], count: int) -> bool:
    total, squares = int(sums[0]), int(sums[1])
    return count * squares == total * total


def _checksum_if_finite(parameter: Tensor) -> str | None:
    """None with NaN or infinity, whose bits may differ."""
    local = local_shard(parameter.detach())
    finite = not local.is_floating_point() or bool(torch.isfinite(local).all())
    return f"{checksum(local) & (1 << 64) - 1:016x}" if finite else None


def _elements(parameter: Tensor, start: int, stop: int) -> Tensor:
    local = local_shard(parameter.detach())
    return local if stop - start == local.numel() else local.contiguous().view(-1)[start:stop]


def _windows(parameters: Sequence[Tensor]) -> list[list[Part]]:
    """Consecutive parts of the parameters, each within the limit of one check."""
    windows: list[list[Part]] = []
    room = 0
    for parameter in parameters:
        local = local_shard(parameter.detach())
        limit, start = _BYTES if local.device.type == "cpu" else _GPU_BYTES, 0
        while start < local.numel():
            if room < local.element_size() * 8:
                windows.append([])
                room = limit
            stop = min(local.numel(), start + room // local.element_size())
            windows[-1].append((parameter, start, stop))
            room -= (stop - start) * local.element_size()
            start = stop
    return windows
