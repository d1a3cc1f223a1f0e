"""The step of `deterministic: everywhere`: the same bits on any number of ranks.

A batch is computed in a fixed number of slices. The gradient of each is computed by itself, from a seed that does not
depend on the number of ranks, and all of them are added in a fixed order (`plan/slicing.py`), as are losses and
weights of slices.

A reduction of torch adds in an order that depends on the number of ranks. Here each rank receives a part of the flat
gradient from all ranks, adds it, and the sums are gathered. Where the slices of a rank are a subtree (12 slices on 2 or
4 ranks), it sends one gradient, as much as in an all-reduce; otherwise several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from paceline.data.loader import MicroBatch
from paceline.errors import TrainError
from paceline.plan.slicing import SliceSum, Span, spans_of
from paceline.runtime.mesh import Mesh
from paceline.runtime.objects import message_device
from paceline.train.train_step import TrainStep

_FROZEN, _UNUSED, _USED = range(3)  # a parameter in the slices of a rank
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


class SlicedStep(TrainStep):
    """Runs each slice of a batch as a micro-batch of its own."""

    def __init__(self, mesh: Mesh, *parts: Any) -> None:
        self._rank, self._shards = mesh.data_rank, mesh.data_ranks
        self.cut(self._shards)
        super().__init__(*parts)
        self._named = [(name.removeprefix("model."), each) for name, each in self._module.named_parameters()]

    def cut(self, slices: int) -> None:
        """Compute batches in this number of slices, which the number of ranks divides."""
        self._slices, self._exchange = slices, SliceExchange(slices, self._shards)
        self._first = self._rank * (slices // self._shards)
        self._sum = SliceSum[Gradients](slices, add_gradients)

    def reset(self) -> None:
        super().reset()
        self._sum = SliceSum[Gradients](self._slices, add_gradients)

    def add(self, micro: MicroBatch) -> Tensor:
        loss = super().add(micro)
        number = self._first + micro.group
        gradients = [parameter.grad for _, parameter in self._named]
        for _, parameter in self._named:
            parameter.grad = None
        self._sum.push((number, number + 1), gradients)
        if micro.last:
            self._add_up(micro, loss.device)
        return loss

    def _add_up(self, micro: MicroBatch, device: torch.device) -> None:
        """Add the gradients and weights of all ranks, after the last slice of this one. Collective."""
        sums = [gradients for _, gradients in self._sum.parts]
        self._sum = SliceSum[Gradients](self._slices, add_gradients)
        used = self._exchange_facts(micro, sums, device)
        held = [number for number, each in enumerate(used) if each]
        parameters = [parameter for _, parameter in self._named]
        whole = [[_or_zeros(gradients[number], parameters[number]) for number in held] for gradients in sums]
        self._exchange.add_up(whole)
        for number, gradient in zip(held, whole[0], strict=True):
            parameters[number].grad = gradient

    def _exchange_facts(self, micro: MicroBatch, sums: list[Gradients], device: torch.device) -> list[bool]:
        """Exchange losses and weights of slices. Returns whether any rank has a gradient, for each parameter."""
        reached = [any(gradient is not None for gradient in each) for each in zip(*sums, strict=True)]
        states = [
            _USED if one else _UNUSED if parameter.requires_grad else _FROZEN
            for one, (_, parameter) in zip(reached, self._named, strict=True)
        ]
        weights = self.weights
        pairs = [_sum_and_weight(loss, weight, weights.means) for loss, weight in weights.losses]
        losses = [number for pair in pairs for number in pair]
        facts = torch.cat([torch.stack(losses), torch.tensor(states, dtype=torch.float64, device=device)])
        table = facts.unsqueeze(0)
        if self._shards > 1:
            facts = facts.to(message_device(None))
            table = facts.new_empty(self._shards, len(facts))
            torch_dist.all_gather(list(table), facts)
        total = SliceSum[Tensor](self._slices, torch.add)
        for number, pair in enumerate(table[:, : len(losses)].reshape(-1, 2)):
            total.push((number, number + 1), pair)
        [(_, (loss, weight))] = total.parts
        weights.take_total(weight, micro)
        # The loss of the batch, with all of its weight on the first rank: sums over ranks add nothing to it.
        weights.losses, weights.means = [(loss / weight, 0.0 if self._rank else weight)], True
        least, most = table[:, len(losses) :].aminmax(dim=0)
        self._require_same_frozen(least.tolist(), most.tolist())
        return [state == _USED for state in most.tolist()]

    def _require_same_frozen(self, least: list[float], most: list[float]) -> None:
        names = [name for (name, _), low, high in zip(self._named, least, most, strict=True) if low == _FROZEN < high]
        if names:
            raise TrainError(
                "requires-grad-differs",
                f"requires_grad of {', '.join(names[:4])} is not the same on all ranks.",
                why="the gradient of a step is the sum over all ranks, which must be of the same parameters",
            )


def refuse_forward(finding: str) -> None:
    """In place of a warning that results depend on the number of ranks."""
    raise TrainError(
        "everywhere-and-forward",
        "The forward gives other results on another number of ranks, with deterministic: everywhere.",
        why=finding,
    )


def _sum_and_weight(loss: Tensor, weight: Tensor | float, is_mean: bool) -> tuple[Tensor, Tensor]:
    """The sum and the weight of a slice, in float64. A placeholder has weight zero, whatever its loss is."""
    number = torch.as_tensor(weight, dtype=torch.float64, device=loss.device).reshape(())
    total = loss.double() * number if is_mean else loss.double()
    return torch.where(number > 0, total, 0.0), number


def _or_zeros(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient
