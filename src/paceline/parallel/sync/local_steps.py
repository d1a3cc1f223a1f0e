"""Local steps: replicas train by themselves and exchange their weights every few steps (local SGD, DiLoCo).

    sync: {every: 50, warmup: 100, outer: {name: nesterov, lr: 0.7}, compress: int8}

    steps 1 … warmup     synchronous: gradients are averaged over replicas before the optimizer step
    then                 local: a step exchanges nothing with other replicas
    every `every` steps  a round: the outer optimizer makes new weights of the changes of all replicas,
                         the same on each of them

A replica is all ranks with the same coordinate on the `replicate` axis. Its rank with a certain shard of the parameters
exchanges it with the ranks of other replicas that have the same shard. The state of the inner optimizer and of the
loss scale stays with its replica.

In a round, buffers and frozen parameters that a replica has changed since the last one are averaged as well (running
statistics of batch norm, a momentum encoder); integers are those of the first replica.

The tensors of a round are one flat one, in pieces of limited size: one collective moves all tensors of a piece.

    flat = FlatTensors(weights)              # names → tensors of one dtype and device
    outer = flat.pack(flat.whole)            # a copy of all elements
    for piece in flat.pieces:
        change = flat.pack(piece) - outer[piece]
        flat.unpack(piece, change)

Elements are in the order of memory, which is the same on every replica, so tensors of any memory format are views. A
complex number is two elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.config.sections import SyncSection
from paceline.models.weights import checksum
from paceline.parallel.sync.casts import DTYPES, cast_mean, int8_mean
from paceline.parallel.sync.exchange import Exchange
from paceline.runtime import collectives

Kinds = dict[str, dict[str, Tensor]]  # `weights`, `momentum`: tensors by name
# What a round needs of additional memory is a small multiple of this. Pieces of 4 MiB stay in the cache of a CPU: a
# round takes a third of the CPU time that it takes with 64 MiB.
_CPU_BYTES, _GPU_BYTES = 4 << 20, 64 << 20


class FlatTensors:
    """`tensors`: of one dtype and device, without gaps in memory. They are read when used, so a parameter may get
    another memory in between."""

    def __init__(self, tensors: Mapping[str, Tensor], piece_bytes: int | None = None) -> None:
        self.tensors = dict(tensors)
        *self._starts, end = accumulate(map(_length, self.tensors.values()), initial=0)
        self.whole = slice(0, end)
        first = next(iter(self.tensors.values()))
        # Averages of half precision weights are computed in float32.
        self.dtype = torch.promote_types(first.dtype, torch.float32).to_real()
        size = piece_bytes or (_CPU_BYTES if first.device.type == "cpu" else _GPU_BYTES)
        length = max(1, size // self.dtype.itemsize)
        self.pieces = [slice(start, min(start + length, end)) for start in range(0, end, length)]

    def pack(self, piece: slice) -> Tensor:
        """A new flat tensor of these elements."""
        parts = self._parts(piece)
        return torch.cat(parts).to(self.dtype) if parts else torch.empty(0, dtype=self.dtype)

    def unpack(self, piece: slice, flat: Tensor) -> None:
        """Copy the elements back."""
        parts = self._parts(piece)
        torch._foreach_copy_(parts, list(flat.split([len(part) for part in parts])))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat tensor of all elements, by name, in the shapes of the tensors."""
        found = {}
        for (name, tensor), start in zip(self.tensors.items(), self._starts, strict=True):
            part = flat[start : start + _length(tensor)]
            part = torch.view_as_complex(part.view(-1, 2)) if tensor.is_complex() else part
            found[name] = part.as_strided(tensor.shape, tensor.stride())
        return found

    def _parts(self, piece: slice) -> list[Tensor]:
        found = []
        for tensor, start in zip(self.tensors.values(), self._starts, strict=True):
            low, high = max(piece.start, start), min(piece.stop, start + _length(tensor))
            if low < high:
                found.append(_in_memory_order(tensor.detach())[low - start : high - start])
        return found


def by_kind(tensors: Mapping[str, Tensor]) -> list[FlatTensors]:
    """One for each dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tensor.dtype, tensor.device), {})[name] = tensor
    return [FlatTensors(same) for same in kinds.values()]


def has_mean(tensor: Tensor) -> bool:
    """Whether it may be averaged: integers may not."""
    return tensor.is_floating_point() or tensor.is_complex()


def has_gaps(tensor: Tensor) -> bool:
    """Whether elements of the tensor are not consecutive in memory, in any order of its dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return True
            expected *= size
    return False


def _length(tensor: Tensor) -> int:
    return tensor.numel() * (1 + tensor.is_complex())


def _in_memory_order(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    return torch.view_as_real(flat).view(-1) if tensor.is_complex() else flat


class LocalSteps:
    """`parameters` and `buffers`: of this rank, as local shards. `trains`: whether a parameter is trained now.
    `exchange`: with the ranks of other replicas that have the same shards."""

    def __init__(
        self,
        section: SyncSection,
        exchange: Exchange,
        parameters: Mapping[str, Tensor],
        buffers: Callable[[], Mapping[str, Tensor]],
        *,
        trains: Callable[[str], bool],
        device: torch.device,
    ) -> None:
        assert section.every is not None
        self._section, self.exchange, self._every, self._warmup = section, exchange, section.every, section.warmup
        self._parameters, self._buffers, self._trains, self._device = parameters, buffers, trains, device
        self.replicas_differ = False  # after a local step, until the next round
        self.spread: Tensor | None = None  # of the last round, until it is read
        self._outer: list[OuterState] | None = None  # None: before the first local step
        # What all replicas had in common, to find what has changed since.
        self._common = {name: _mark(tensor) for name, tensor in parameters.items()}

    @property
    def compares(self) -> bool:
        """Whether a round needs the weights after the last one, to compare with; else it averages weights."""
        return self._section.compress is not None or self._section.outer.name == "nesterov"

    def is_synchronous(self, step: int) -> bool:
        """Whether replicas average the gradients of a step, counted from 0."""
        return step < self._warmup

    def before_step(self, step: int) -> None:
        """Call before the update of a step, counted from 0."""
        if self._outer is None and not self.is_synchronous(step):
            self._begin(self._trained())

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Run a round if one is due after this number of steps. Collective then, and in the warm-up."""
        if step <= self._warmup:
            self._average_others()
            return
        self.replicas_differ = True
        if (step - self._warmup) % self._every == 0:
            self._round()

    def any_replica(self, flags: Sequence[bool]) -> list[bool]:
        """Which of these flags are set on any replica. Collective."""
        numbers = torch.tensor(flags, dtype=torch.float32, device=self._device)
        if flags:
            self.exchange.all_reduce(numbers)
        return [number > 0 for number in numbers.tolist()]

    @torch.no_grad()
    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their mean over replicas, uncompressed; integers by those of the first one. Collective."""
        named = {str(number): tensor for number, tensor in enumerate(tensors)}
        for flat in by_kind({name: tensor for name, tensor in named.items() if has_mean(tensor)}):
            for piece in flat.pieces:
                flat.unpack(piece, plain_mean(flat.pack(piece), self.exchange))
        integers = [tensor for tensor in tensors if not has_mean(tensor)]
        if integers:
            first = torch.cat([tensor.detach().reshape(-1).to(torch.int64) for tensor in integers])
            if self.exchange.rank:
                first.zero_()
            self.exchange.all_reduce(first)
            for tensor, values in zip(integers, first.split([each.numel() for each in integers]), strict=True):
                tensor.detach().copy_(values.view(tensor.shape))

    def mean_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """New tensors with the mean over replicas. Collective: must be called on every rank, with the same names."""
        means = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.average_(list(means.values()))
        return means

    @torch.no_grad()
    def average(self) -> None:
        """Give all replicas the mean of their weights, if these differ. The outer optimizer takes no step, and the next
        round comes when it would have. Collective."""
        if self.replicas_differ:
            self.average_(list(self._trained().values()))
            self._average_others()
            self.replicas_differ = False

    def state_dict(self) -> Kinds:
        """Outer weights and momentum by parameter name, the same on all replicas. Views, not copies."""
        return self._tensors("weights", "momentum")

    def local_state(self) -> Kinds:
        """The error feedback of this replica, by parameter name. Views, not copies."""
        return self._tensors("feedback")

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over `state_dict()` and `local_state()`. Where these are missing, training begins anew with the current
        weights, which must be the same on all replicas."""
        self._outer, self.replicas_differ = None, False
        if any(saved.values()):
            for outer in self._begin(self._trained()):
                outer.take_over(saved)

    def _tensors(self, *kinds: str) -> Kinds:
        found: Kinds = {kind: {} for kind in kinds}
        for outer in self._outer or ():
            for kind, views in outer.tensors().items():
                if kind in found:
                    found[kind] |= views
        return {kind: tensors for kind, tensors in found.items() if tensors}

    def _trained(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._parameters.items() if self._trains(name)}

    @torch.no_grad()
    def _begin(self, trained: Mapping[str, Tensor]) -> list[OuterState]:
        self._outer = [OuterState(flat, self._section, self.exchange) for flat in by_kind(trained)]
        return self._outer

    def _round(self) -> None:
        assert self._outer is not None
        trained = self._trained()
        if set(trained) != {name for outer in self._outer for name in outer.weights.tensors}:
            self._follow(trained)
        squares = torch.zeros(2, dtype=torch.float64, device=self._device)
        for outer in self._outer:
            for piece in outer.weights.pieces:
                squares += outer.step(piece)
        self._average_others()
        collectives.all_reduce(squares)  # of all shards
        self.exchange.traffic.all_reduce(squares.nbytes, collectives.world())
        self.spread = (squares[0] / squares[1]).sqrt()
        self.replicas_differ = False

    def _follow(self, trained: Mapping[str, Tensor]) -> None:
        """Parameters were frozen or unfrozen since the last round. New ones are averaged now, and begin anew."""
        before = self._tensors("weights", "momentum", "feedback")
        known = {name for outer in self._outer or () for name in outer.weights.tensors}
        self.average_([tensor for name, tensor in trained.items() if name not in known])
        for outer in self._begin(trained):
            outer.take_over(before)

    def _average_others(self) -> None:
        """Average the buffers and frozen parameters that differ between replicas."""
        trained, buffers = self._trained(), self._buffers()
        frozen = {name: tensor for name, tensor in self._parameters.items() if name not in trained}
        flags = self.any_replica([self._common.get(name) != _mark(tensor) for name, tensor in frozen.items()])
        others = [tensor for tensor, changed in zip(frozen.values(), flags, strict=True) if changed]
        # Batch norm changes its statistics without marking them as changed.
        self.average_(self._differing([*others, *buffers.values()]))
        self._common = {name: _mark(tensor) for name, tensor in frozen.items()}

    def _differing(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those that differ between replicas. The mean of equal numbers is not always the same number."""
        if not tensors:
            return []
        own = torch.tensor([checksum(tensor) for tensor in tensors], device=self._device)
        self.exchange.all_gather(sums := own.new_empty(self.exchange.ranks * len(own)), own).wait()
        differ = (sums.view(-1, len(own)) != own).any(0).tolist()
        return [tensor for tensor, differs in zip(tensors, differ, strict=True) if differs]


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Another one after each operation that writes to the tensor."""
    return tensor.data_ptr(), tensor._version


class OuterState:
    """Outer weights, momentum and error feedback of tensors of one dtype. `weights` are equal on all replicas now."""

    def __init__(self, weights: FlatTensors, section: SyncSection, exchange: Exchange) -> None:
        self.weights, self._exchange, self._compress = weights, exchange, section.compress
        self._outer, copied = section.outer, weights.pack(weights.whole)
        # The plain mean of weights needs nothing to compare them with.
        compares = section.compress is not None or section.outer.name == "nesterov"
        self._flat: dict[str, Tensor] = {"weights": copied} if compares else {}
        if section.outer.name == "nesterov":
            self._flat["momentum"] = torch.zeros_like(copied)
        if section.compress == "int8":
            self._flat["feedback"] = torch.zeros_like(copied)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Views of `weights`, `momentum` and `feedback`, as far as there are any, by the names of the tensors."""
        return {kind: self.weights.views(flat) for kind, flat in self._flat.items()}

    def step(self, piece: slice) -> Tensor:
        """Set these elements of the weights to the result of a round, equal on all replicas. Collective. Returns two
        sums of squares in this replica: of its distance from the mean of all weights, and of that mean."""
        own = self.weights.pack(piece)
        outer = self._flat["weights"][piece] if "weights" in self._flat else None
        mean = self._mean(piece, own if outer is None else own - outer)
        if outer is None:
            new = average = mean
        else:
            average = outer + mean
            outer.copy_(average if self._outer.name == "average" else self._nesterov(piece, outer, mean))
            new = outer
        self.weights.unpack(piece, new)
        return torch.stack([torch.linalg.vector_norm(own - average), torch.linalg.vector_norm(average)]).double() ** 2

    def _mean(self, piece: slice, change: Tensor) -> Tensor:
        """The mean over replicas, in the format of `compress`."""
        if self._compress == "int8":
            feedback = self._flat["feedback"][piece]
            mean, lost = int8_mean(change + feedback, self._exchange)
            feedback.copy_(lost)
            return mean
        if self._compress is not None:
            return cast_mean(change, DTYPES[self._compress], self._exchange)
        return plain_mean(change, self._exchange)

    def _nesterov(self, piece: slice, outer: Tensor, change: Tensor) -> Tensor:
        momentum = self._flat["momentum"][piece]
        momentum.mul_(self._outer.momentum).sub_(change)
        return outer - self._outer.lr * (self._outer.momentum * momentum - change)

    def take_over(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the tensors of `tensors()`, as far as they are given."""
        for kind, views in self.tensors().items():
            for name, view in views.items():
                if name in saved.get(kind, {}):
                    view.copy_(saved[kind][name])


def plain_mean(flat: Tensor, exchange: Exchange) -> Tensor:
    """Divided before the sum, which would overflow in float16."""
    mean = flat / exchange.ranks
    exchange.all_reduce(mean)
    return mean
