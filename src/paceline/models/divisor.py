"""What a mean loss was divided by, read from its autograd graph.

A mean over the targets that count (class weights, ignored targets, shifted labels, a mask) is no mean over samples. Its
backward needs the number that it was divided by, so the graph holds it: no rule about the model is needed.

    F.cross_entropy(…), nn.CrossEntropyLoss, model(**batch).loss     the weight of the counted targets
    (losses * mask).sum() / mask.sum()                               the divisor
    losses[mask].mean()                                              the number of elements

Casts, views, constant factors and added terms are looked through. Of several means, the divisor of the first is taken;
the pre-flight compares the loss of a batch with that of its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MEAN = 1  # torch's number for reduction="mean"
_DEPTH = 12  # nodes from the loss to its mean; a regularization term may be deep
_COUNTED = ("NllLossBackward0", "NllLoss2DBackward0")
_SUMS = ("SumBackward0", "DotBackward0")
_SAME_VALUE = ("ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0",
               "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "SelectBackward0", "CloneBackward0",
               "SplitBackward0", "UnbindBackward0")  # fmt: skip
_LINEAR = ("AddBackward0", "SubBackward0", "RsubBackward1", "MulBackward0", "MulBackward1", "DivBackward0",
           "DivBackward1", "NegBackward0", "StackBackward0", "WhereBackward0", "NanToNumBackward0")  # fmt: skip
_ELEMENTWISE = ("PowBackward0", "AbsBackward0", "SquareBackward0", "ExpBackward0", "LogBackward0", "ClampBackward1")
_COUNTS = (*_SAME_VALUE, "ClampBackward0", "ClampBackward1", "ClampMinBackward0", "AddBackward0", "MaximumBackward0")
_INTERVAL = 64  # micro-batches between two looks at the device
_ROUNDING = 1e-3  # of the divisors of label smoothing with class weights
_START = "_paceline_start"
_SELECTIONS = ("IndexBackward0", "MaskedSelectBackward0")


class Divisor(NamedTuple):
    """The weight of a mean: what it was divided by."""

    weight: Tensor | float


def divisor_of(loss: Tensor) -> Tensor | float | None:
    """What a scalar loss was divided by; None if its graph does not show it (a mean over all samples, a sum, a loss
    computed in a compiled graph)."""
    return next(_divisors(loss.grad_fn, _DEPTH), None)


def divisors_of(loss: Tensor) -> list[Tensor | float]:
    """Those of all means that a loss adds up."""
    return list(_divisors(loss.grad_fn, _DEPTH))


class Proportions:
    """Warns if the means that a loss adds up are not always divided by numbers in the same proportion: then no weight
    is right for all of them, and the loss depends on how a batch is sliced."""

    def __init__(self) -> None:
        self.warn: Callable[[str], object] | None = None
        self._first: list[float] | None = None
        self._changed: Any = False
        self._added = 0

    def add(self, divisors: list[Any]) -> None:
        if self._first is None:
            numbers = [float(divisor) for divisor in divisors]
            self._changed = len(set(numbers)) > 1 and not all(numbers)
            self._first = numbers if all(numbers) else None
        else:
            for other, first in zip(divisors[1:], self._first[1:], strict=False):
                expected = divisors[0] * (first / self._first[0])
                changed = abs(other - expected) > _ROUNDING * abs(expected)
                if isinstance(other, Tensor) and not other.is_floating_point():
                    changed &= other != first  # a constant may be the size of a weight, in a penalty
                self._changed = self._changed | changed
        self._added += 1
        waits = isinstance(self._changed, Tensor) and self._changed.device.type != "cpu"  # for the device
        if self.warn is not None and (not waits or self._added % _INTERVAL == 0) and self._changed:
            self.warn(
                f"loss: it adds up {len(divisors)} means, which were divided by {', '.join(map(_shown, divisors))}, in "
                "another proportion than before. They are weighted by the first one, so the result depends on the "
                "number of ranks and micro-batches. Return paceline.Loss(sum, weight) with one weight for all of them"
            )
            self.warn = None


def _shown(number: Tensor | float) -> str:
    return f"{float(number):g}"


def weighted_mean(mean: Tensor, samples: int, *, divides: bool | None) -> tuple[Tensor, Tensor | float]:
    """(sum, weight) of a mean that was computed in a `LossGraph`, without its graph."""
    count = None if divides is False else divisor_of(mean)
    if count is None:
        return mean.detach() * samples, samples
    return torch.where(torch.as_tensor(count) > 0, mean.detach(), 0.0) * count, count


def _divisors(node: Any, depth: int) -> Iterator[Tensor | float]:
    if node is None or not depth:
        return
    name = type(node).__name__
    if name in _COUNTED:
        if node._saved_reduction == _MEAN:
            yield _counted_targets(node)
        return
    found = None
    if name == "DivBackward0" and _is_count(node.next_functions[1][0]):
        found = _divisor_of_quotient(node)
    elif name in ("MeanBackward0", "MeanBackward1") or getattr(node, "_saved_reduction", None) == _MEAN:
        found = _selected_elements(node, name)
    if found is not None:
        yield found
    elif name in _SAME_VALUE or name in _LINEAR or _reduces_stack(node, name):
        for inner, _ in node.next_functions:
            yield from _divisors(inner, depth - 1)


def _counted_targets(node: Any) -> Tensor:
    total: Tensor = node._saved_total_weight
    if node._saved_weight is not None:  # 0/0 where a slice has only classes of weight zero
        node.register_hook(_NoGradientWithoutWeight(total))
    if total.dtype in (torch.bfloat16, torch.float16) and node._saved_weight is None:  # counted in half precision
        ignored = node._saved_ignore_index
        ignored -= (ignored >> 63) << 64  # an unsigned number in Python
        total = (node._saved_target != ignored).sum()
    return total


def _divisor_of_quotient(node: Any) -> Tensor | float | None:
    """The divisor of sum / count; that of mean / share is count / elements."""
    divisor: Tensor = node._saved_other.detach()
    inner = _skip_same_value(node.next_functions[0][0])
    if divisor.numel() != 1:
        return None
    divisor, name = divisor.reshape(()), type(inner).__name__
    metadata = node._input_metadata[0] if hasattr(node, "_input_metadata") else None
    is_constant = divisor.dtype is torch.float64 and metadata is not None and metadata.dtype is not torch.float64
    if is_constant:  # a Python float
        return None
    if name in _SUMS and not _reduces_stack(inner, name):
        node.register_hook(_NoGradientWithoutWeight(divisor))
        return divisor
    if name == "MeanBackward0" and divisor.is_floating_point():
        node.register_hook(_NoGradientWithoutWeight(divisor))
        return divisor * int(inner._saved_self_sym_numel)
    return None


def _is_count(node: Any) -> bool:
    """Whether a divisor is no function of the parameters. `LossGraph` can't tell a sum of a mask from other sums."""
    while type(node).__name__ in _COUNTS:
        inner = [each for each, _ in node.next_functions if each is not None]
        node = inner[0] if len(inner) == 1 else "several"
    if node is None:
        return True
    return type(node).__name__ in ("SumBackward0", "MeanBackward0") and _is_recorded(node.next_functions[0][0])


def _is_recorded(node: Any) -> bool:
    """Whether this is where a `LossGraph` began."""
    return type(node).__name__ == "AccumulateGrad" and hasattr(node.variable, _START)


def _selected_elements(node: Any, name: str) -> float | None:
    """The number of elements of a mean, if a mask selected them."""
    if not any(_selects(inner, 4) for inner, _ in node.next_functions):
        return None
    return float(node._saved_self_sym_numel if name == "MeanBackward0" else node._saved_self.numel())


def _selects(node: Any, depth: int) -> bool:
    if node is None or not depth:
        return False
    name = type(node).__name__
    if name in _SELECTIONS:
        return True
    passes = name in _SAME_VALUE or name in _LINEAR or name in _ELEMENTWISE
    return passes and any(_selects(inner, depth - 1) for inner, _ in node.next_functions)


def _skip_same_value(node: Any) -> Any:
    while type(node).__name__ in _SAME_VALUE:
        node = node.next_functions[0][0]
    return node


def _reduces_stack(node: Any, name: str) -> bool:
    """torch.stack(losses).sum(), or their mean."""
    inner = node.next_functions[0][0] if name in ("SumBackward0", "MeanBackward0") else None
    return type(inner).__name__ == "StackBackward0"


class _NoGradientWithoutWeight:
    """At weight zero the gradient of a mean is 0/0: return zeros. A hook of the node that divides."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, gradients: tuple[Any, ...], _: Any) -> tuple[Any, ...]:
        return tuple(None if each is None else torch.where(self._weight != 0, each, 0.0) for each in gradients)


class LossGraph(TorchFunctionMode):
    """Without gradients, record the graph of the loss alone: from the first reduction to a scalar, or selection by a
    mask, on. The graph of the model is not recorded, so no activations are kept."""

    def __init__(self) -> None:
        super().__init__()
        self._started = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _STARTS and _starts(func, args, kwargs) and not torch.is_grad_enabled():
            self._started = True
            if args[0].grad_fn is None:
                start = args[0].detach().requires_grad_()
                setattr(start, _START, True)
                args = (start, *args[1:])
        elif not self._started or not _has_graph(args):
            return func(*args, **kwargs) if kwargs else func(*args)
        with torch.enable_grad():
            return func(*args, **kwargs) if kwargs else func(*args)


def _has_graph(args: Any) -> bool:
    return any(
        each.grad_fn is not None if isinstance(each, Tensor) else isinstance(each, (list, tuple)) and _has_graph(each)
        for each in args
    )


def _starts(func: Any, args: Any, kwargs: Any) -> bool:
    if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return False
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in index)
    return func not in (Tensor.sum, torch.sum, Tensor.mean, torch.mean) or (
        len(args) == 1 and "dim" not in (kwargs or ())
    )


_STARTS = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    torch.sum,
    torch.mean,
    torch.masked_select,
    Tensor.sum,
    Tensor.mean,
    Tensor.masked_select,
    Tensor.__getitem__,
}
