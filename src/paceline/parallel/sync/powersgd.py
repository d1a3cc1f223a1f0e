"""PowerSGD: gradients as products of two thin matrices (Vogels et al., 2019, arXiv:1905.13727).

One step of subspace iteration approximates the mean M of an n × m gradient by P Qᵀ, with `rank` columns each:

    P = M Q        summed over ranks, then made orthonormal
    Q = Mᵀ P       summed over ranks; it starts the next step (`warm_start`), in which gradients have changed little

Ranks send rank × (n + m) numbers instead of n × m. A parameter is compressed if that is fewer by a factor of
`min_ratio`; others, such as biases and norms, are sent uncompressed together with P. A rank above n or m never saves
anything. Parameters with more than two dims are matrices whose rows belong to their outermost dim in memory.

Error feedback is what this rank's own P Qᵀ misses of its M. It is orthogonal to P, so that it stays bounded even where
ranks have different gradients; its mean over ranks, which is all that matters, is what the mean of M misses.

Columns of P that vanish, or that depend on the columns before them, become zero. In Q they are replaced by random
ones: a gradient that was zero for a while is found again. All of this is computed from sums, which are equal on all
ranks, and so is the result.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise
from math import prod

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from paceline.errors import LayoutError
from paceline.parallel.sync.compression import (
    BucketSlices,
    Compression,
    NamedState,
    Slot,
    StepEnd,
    add_unscaled,
    dense_mean,
)  # fmt: skip
from paceline.parallel.sync.exchange import Collectives, Exchange
from paceline.runtime.rng import derive_seed

_Q = "q."  # prefix of names in the replicated state
_STEPS = "steps"


class PowerSGD(Compression):
    """`start`: number of uncompressed steps at the beginning."""

    def __init__(
        self, exchange: Exchange, *, rank: int = 1, start: int = 0, min_ratio: float = 2.0, warm_start: bool = True
    ) -> None:
        super().__init__(exchange)
        self.rank, self.start, self.min_ratio, self.warm_start = rank, start, min_ratio, warm_start
        self._steps = 0
        self._errors = NamedState()
        self._factors = NamedState(initial=lambda name, q: q.copy_(random_rows(name, 0, q)))
        self._step_end = StepEnd()

    def begin(self, names: Mapping[Tensor, str]) -> None:
        slots = [Slot(name, parameter.size(), parameter.stride(), 0) for parameter, name in names.items()]
        if not any(map(self.compresses, slots)):
            sizes = sorted((_matrix_size(slot) for slot in slots), key=prod, reverse=True)
            largest = f"the largest is {sizes[0][0]} × {sizes[0][1]}" if sizes else "there are none"
            raise LayoutError(
                "nothing-to-compress",
                f"powersgd with rank {self.rank} compresses no parameter by {self.min_ratio:g} × ({largest}).",
            )
        super().begin(names)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        if self._steps >= self.start:
            return super().reduce(bucket)
        flat = bucket.buffer()
        return self._queue.submit(self._counted(dense_mean(flat, self.exchange), bucket.is_last()), flat)

    def compresses(self, slot: Slot) -> bool:
        rows, columns = _matrix_size(slot)
        return rows * columns >= self.min_ratio * self.rank * (rows + columns) > 0

    def _prepare(self, bucket: BucketSlices) -> Callable[[], Collectives[None]]:
        compressed = [slot for slot in bucket.slots if self.compresses(slot)]
        if not compressed:
            return lambda: self._counted(self._average_dense(bucket), bucket.is_last)
        factored = _FactoredBucket(bucket, compressed, self.rank, self._errors, self._factors)
        return lambda: self._counted(self._average(factored), bucket.is_last)

    def _counted(self, average: Collectives[None], is_last: bool) -> Collectives[None]:
        """Sequences of a step run one after the other, so the number of steps is constant during each."""
        yield from average
        self._steps += is_last

    def _average_dense(self, bucket: BucketSlices) -> Collectives[None]:
        yield from dense_mean(bucket.flat, self.exchange)
        self._step_end.add(bucket.is_first, bucket.is_last, bucket.flat.isfinite().all())

    def _average(self, factored: _FactoredBucket) -> Collectives[None]:
        scale = 1.0 if self.scale is None else self.scale()
        if not self.warm_start:
            factored.randomize(self._steps)
        factored.multiply_by_q(scale)
        yield self.exchange.all_reduce(factored.message, async_op=True)
        finite = factored.message.isfinite().all()
        factored.multiply_by_p(self.exchange.ranks)
        summation = self.exchange.all_reduce(factored.q.next, async_op=True)
        factored.subtract_product()  # while Q is on its way
        yield summation
        finite = finite & factored.q.next.isfinite().all()
        factored.write_product(scale, self.exchange.ranks)
        bucket = factored.bucket
        self._step_end.add(bucket.is_first, bucket.is_last, finite, factored.error, factored.q)

    def sent_bytes(self, parameter: Tensor) -> float:
        slot = Slot("", parameter.size(), parameter.stride(), 0)
        if not self.compresses(slot):
            return parameter.nbytes
        return sum(_matrix_size(slot)) * self.rank * max(parameter.element_size(), 4)

    def replicated_state(self) -> dict[str, Tensor]:
        factors = self._factors.state() if self.warm_start else {}
        return {_STEPS: torch.tensor(self._steps), **{_Q + name: q for name, q in factors.items()}}

    def local_state(self) -> dict[str, Tensor]:
        return self._errors.state()

    def load(self, replicated: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        super().load(replicated, local)
        self._steps = int(replicated.get(_STEPS, 0))
        factors = {name.removeprefix(_Q): q for name, q in replicated.items() if name != _STEPS}
        self._factors.load({name: q for name, q in factors.items() if len(q) == self.rank})  # of another rank otherwise
        self._errors.load(local)


class _FactoredBucket:
    """The matrices of a bucket and their factors. Matrices of one size are neighbours in P and Q, which are stored by
    column, so that a few operations on all of them make their columns orthonormal."""

    def __init__(
        self, bucket: BucketSlices, compressed: list[Slot], rank: int, errors: NamedState, factors: NamedState
    ) -> None:
        flat = self._flat = bucket.flat
        self.bucket = bucket
        dtype = torch.promote_types(flat.dtype, torch.float32)
        groups: dict[tuple[int, int], list[Slot]] = defaultdict(list)
        for slot in compressed:
            groups[_matrix_size(slot)].append(slot)
        ps = _Columns([(len(slots), rank, rows) for (rows, _), slots in groups.items()])
        qs = self._q_columns = _Columns([(len(slots), rank, columns) for (_, columns), slots in groups.items()])

        # Everything else is sent with P.
        ranges = _ranges_between([(slot.offset, slot.numel) for slot in compressed], flat.numel())
        lengths = [stop - start for start, stop in ranges]
        self.message = flat.new_empty(ps.length + sum(lengths), dtype=dtype)
        self._rest = self.message[ps.length :]
        self._rest_parts = list(self._rest.split(lengths))
        self._rest_of_flat = [flat[start:stop] for start, stop in ranges]

        matrices = [slot for slots in groups.values() for slot in slots]
        self.error = errors.collect(matrices, like=flat.new_empty(flat.shape, dtype=dtype))
        self._rest_of_errors = [[copy[start:stop] for start, stop in ranges] for copy in self.error.copies]
        self._matrices = [[_matrix(slot, copy) for slot in matrices] for copy in self.error.copies]
        self._p_groups, self._ps = ps.groups_of(self.message), ps.matrices_of(self.message)
        own = flat.new_empty(qs.length, dtype=dtype)
        self._own_q, self._own_qs = own, qs.matrices_of(own)
        slots = zip(matrices, qs.matrices_of(own), strict=True)
        self.q = factors.collect(
            [Slot(slot.name, q.size(), q.stride(), int(q.storage_offset())) for slot, q in slots], like=own
        )
        self._spare = torch.empty_like(own)
        for slot, spare in zip(matrices, qs.matrices_of(self._spare), strict=True):
            spare.copy_(random_rows(slot.name, 0, spare))
        # Products have the dtype of their factors.
        self._product = flat if flat.dtype == dtype else flat.new_empty(flat.shape, dtype=dtype)
        self._products = [_matrix(slot, self._product) for slot in matrices]
        self._flat_matrices = [_matrix(slot, flat) for slot in matrices]

    def randomize(self, step: int) -> None:
        for name, slot in self.q.slots.items():
            q = slot.of(self.q.value)
            q.copy_(random_rows(name, step, q))

    def multiply_by_q(self, scale: Tensor | float) -> None:
        """P = M Q, where M is the gradient and the error of earlier steps."""
        following = 1 - self.error.current
        add_unscaled(self.error.value, self._flat, scale, out=self.error.next)
        if self._rest_parts:
            torch._foreach_copy_(self._rest_parts, self._rest_of_flat)
            torch._foreach_zero_(self._rest_of_errors[following])
        qs = self._q_columns.matrices_of(self.q.value)
        for matrix, q, p in zip(self._matrices[following], qs, self._ps, strict=True):
            torch.mm(q, matrix.t(), out=p)

    def multiply_by_p(self, ranks: int) -> None:
        """Q = Mᵀ P, of this rank."""
        if self._rest_parts:
            self._rest /= ranks
            torch._foreach_copy_(self._rest_of_flat, self._rest_parts)
        for group in self._p_groups:
            orthonormalize(group)
        matrices = self._matrices[1 - self.error.current]
        for matrix, p, q in zip(matrices, self._ps, self._own_qs, strict=True):
            torch.mm(p, matrix, out=q)
        self.q.next.copy_(self._own_q)

    def subtract_product(self) -> None:
        matrices = self._matrices[1 - self.error.current]
        for matrix, p, q in zip(matrices, self._ps, self._own_qs, strict=True):
            matrix.addmm_(p.t(), q, alpha=-1.0)

    def write_product(self, scale: Tensor | float, ranks: int) -> None:
        """P Qᵀ with the mean of Q, which is then prepared for the next step."""
        torch.mul(self.q.next, scale / ranks, out=self._own_q)
        for product, p, q in zip(self._products, self._ps, self._own_qs, strict=True):
            torch.mm(p.t(), q, out=product)
        if self._product is not self._flat:
            torch._foreach_copy_(self._flat_matrices, self._products)
        spares = self._q_columns.groups_of(self._spare)
        for group, spare in zip(self._q_columns.groups_of(self.q.next), spares, strict=True):
            orthonormalize(group, spare)


class _Columns:
    """Where groups of equal factors are in a flat tensor: the columns of each factor are rows here."""

    def __init__(self, groups: list[tuple[int, int, int]]) -> None:
        self._groups = groups
        self._lengths = [number * rank * size for number, rank, size in groups]
        self.length = sum(self._lengths)

    def groups_of(self, flat: Tensor) -> list[Tensor]:
        parts = flat[: self.length].split(self._lengths)
        return [part.view(group) for part, group in zip(parts, self._groups, strict=True)]

    def matrices_of(self, flat: Tensor) -> list[Tensor]:
        return [matrix for group in self.groups_of(flat) for matrix in group]


def orthonormalize(rows: Tensor, spare: Tensor | None = None) -> None:
    """Make the rows of each matrix of a batch orthonormal, in place (Gram–Schmidt). Rows that are zero, or a sum of
    earlier ones up to rounding, become zero, or are replaced by those of `spare`. Non-finite rows become NaN."""
    least = torch.finfo(rows.dtype).eps ** 0.5
    for number in range(rows.shape[1]):
        row, earlier = rows[:, number : number + 1], rows[:, :number]
        before = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        before += before - before  # NaN where it overflowed: division by infinity would hide that
        norm = _without(row, earlier, before) + (before - before)
        vanished = norm <= least * before
        if spare is not None and (rows.is_cuda or bool(vanished.any())):
            row.copy_(torch.where(vanished, spare[:, number : number + 1], row))
            norm = _without(row, earlier, torch.linalg.vector_norm(row, dim=-1, keepdim=True))
            vanished = norm == 0.0
        row *= norm.reciprocal().masked_fill_(vanished, 0.0)


def _without(row: Tensor, earlier: Tensor, norm: Tensor) -> Tensor:
    """Subtract what `row` has in common with earlier rows, and return its norm."""
    if not earlier.shape[1]:
        return norm
    row.baddbmm_(torch.bmm(row, earlier.mT), earlier, alpha=-1.0)
    remaining: Tensor = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    return remaining


def random_rows(name: str, step: int, like: Tensor) -> Tensor:
    """Orthonormal rows that depend only on the parameter and the step: equal on all ranks, and after a resume."""
    generator = torch.Generator().manual_seed(derive_seed(zlib.crc32(name.encode()), step))
    rows = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    orthonormalize(rows.unsqueeze(0))
    return rows.to(like.device)


def _matrix_size(slot: Slot) -> tuple[int, int]:
    """Rows are the outermost dim in memory, which need not be the first one (channels_last)."""
    dims = [(stride, size) for stride, size in zip(slot.stride, slot.size, strict=True) if size != 1]
    rows = max(dims, default=(1, 1))[1]
    return rows, slot.numel // rows if rows else 0


def _matrix(slot: Slot, flat: Tensor) -> Tensor:
    return flat[slot.offset : slot.offset + slot.numel].view(_matrix_size(slot))


def _ranges_between(taken: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """What is not covered by ranges (offset, length)."""
    ends = [(0, 0), *((offset, offset + count) for offset, count in sorted(taken)), (length, length)]
    gaps = ((stop, start) for (_, stop), (start, _) in pairwise(ends))
    return [(start, stop) for start, stop in gaps if start < stop]
