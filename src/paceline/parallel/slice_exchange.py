"""Adds the gradients of all ranks in the order of `plan/slicing.py`.

A reduction of torch adds in an order that depends on the number of ranks. Here each rank receives a part of the flat
gradient from all ranks, adds it, and the sums are gathered. Where the slices of a rank are a subtree (12 slices on 2 or
4 ranks), it sends one gradient, as much as in an all-reduce; otherwise several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as torch_dist
from torch import Tensor

from paceline.plan.slicing import SliceSum, Span, spans_of
from paceline.runtime.objects import message_device

_BUCKET = 1 << 24  # elements that are exchanged at once

Gradients = list[Tensor | None]  # of all parameters; None: the loss did not depend on it


@torch.no_grad()
def add_gradients(left: Gradients, right: Gradients) -> Gradients:
    """The sum, in the memory of the arguments. A gradient that does not exist counts as zeros if the other one does, as
    it would in an exchange: adding zero changes -0.0."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    if len(both) == len(left):
        return left
    return [a if b is None and a is None else _sum(a, b) for a, b in zip(left, right, strict=True)]


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is not None and right is not None:
        return left  # already added
    one = left if right is None else right
    return None if one is None else one.add_(0.0)


class SliceExchange:
    """The exchange between `ranks` ranks, which have computed consecutive parts of the slices of a batch."""

    def __init__(self, slices: int, ranks: int) -> None:
        self._slices, self._ranks, own = slices, ranks, slices // ranks
        self._spans: list[list[Span]] = [spans_of(slices, rank * own, (rank + 1) * own) for rank in range(ranks)]

    @torch.no_grad()
    def add_up(self, sums: Sequence[Sequence[Tensor]]) -> None:
        """Add the sums of all ranks, in the memory of the first one of this rank. Collective."""
        if self._ranks == 1:
            return
        device = message_device(None)
        for bucket in _buckets(sums[0]):
            flat = [torch.cat([gradients[number].reshape(-1) for number in bucket]).to(device) for gradients in sums]
            total = self._add_flat(flat)
            targets = [sums[0][number] for number in bucket]
            parts = total.split([target.numel() for target in targets])
            torch._foreach_copy_(targets, [part.view(t.shape) for part, t in zip(parts, targets, strict=True)])

    def _add_flat(self, flat: list[Tensor]) -> Tensor:
        """Bytes are exchanged: no backend supports all dtypes."""
        ranks, length = self._ranks, flat[0].numel()
        part = -(-length // ranks)
        sent = flat[0].new_zeros(ranks, len(flat), part)
        for number, each in enumerate(flat):
            padded = torch.nn.functional.pad(each, (0, ranks * part - length)) if length < ranks * part else each
            sent[:, number] = padded.view(ranks, part)
        counts = [len(spans) for spans in self._spans]
        received = flat[0].new_empty(sum(counts), part)
        row = part * received.element_size()
        torch_dist.all_to_all_single(
            received.view(torch.uint8).view(-1),
            sent.view(torch.uint8).view(-1),
            [count * row for count in counts],
            [len(flat) * row] * ranks,
        )
        total = SliceSum[Tensor](self._slices, Tensor.add_)
        for span, value in zip([span for spans in self._spans for span in spans], received, strict=True):
            total.push(span, value)
        [(_, own)] = total.parts
        gathered = flat[0].new_empty(ranks, part)
        torch_dist.all_gather(list(gathered.view(torch.uint8)), own.view(torch.uint8))
        return gathered.view(-1)[:length]


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[int]]:
    """Numbers of gradients of one dtype and device, which are exchanged together."""
    kinds = dict.fromkeys((gradient.dtype, gradient.device) for gradient in gradients)
    for kind in kinds:
        bucket: list[int] = []
        size = 0
        for number, gradient in enumerate(gradients):
            if (gradient.dtype, gradient.device) != kind:
                continue
            if bucket and size + gradient.numel() > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(number)
            size += gradient.numel()
        yield bucket
