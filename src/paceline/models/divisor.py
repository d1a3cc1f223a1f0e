"""What a mean loss was divided by, read from its autograd graph.

A mean over the targets that count (class weights, ignored targets, shifted labels, a mask) is not a mean over samples.
Its backward needs the number that it was divided by, so the graph holds it: no rule about the model is needed.

    F.cross_entropy(…), nn.CrossEntropyLoss, model(**batch).loss     the weight of the counted targets
    (losses * mask).sum() / mask.sum()                               the divisor
    losses[mask].mean(), losses.index_select(0, rows).mean()         the number of elements
    losses.sum() * (1 / mask.sum())                                  the inverse of the factor

Casts, views, constant factors and added terms are looked through. Of several means, the divisor of the first is taken;
`Proportions` compares it with the others in every micro-batch. What the graph does not show (weights that were
normalized before, a Python number) shows when the loss of a batch is compared with that of its halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.errors import TrainError

_MEAN = 1  # torch's number for reduction="mean"
_NODES = 10_000  # that are looked at: a loop over parameters adds some for each of them
_COUNTED = ("NllLossBackward0", "NllLoss2DBackward0")
_SUMS = ("SumBackward0", "SumBackward1", "NansumBackward0", "DotBackward0", "BmmBackward0")  # einsum is a product
_SAME_VALUE = ("ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0",
               "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "SelectBackward0", "CloneBackward0",
               "SplitBackward0", "UnbindBackward0", "PermuteBackward0")  # fmt: skip
_LINEAR = ("AddBackward0", "SubBackward0", "RsubBackward1", "MulBackward0", "MulBackward1", "DivBackward0",
           "DivBackward1", "NegBackward0", "StackBackward0", "WhereBackward0", "NanToNumBackward0")  # fmt: skip
_ELEMENTWISE = ("PowBackward0", "AbsBackward0", "SquareBackward0", "ExpBackward0", "LogBackward0", "ClampBackward1")
_COUNTS = (*_SAME_VALUE, "ClampBackward0", "ClampBackward1", "ClampMinBackward0", "AddBackward0", "MaximumBackward0")
_INTERVAL = 64  # micro-batches between two looks at the device
_FACTORS = (torch.float32, torch.bfloat16, torch.float16)
_ROUNDED = 1e-6  # of the inverse of a count
_ROUNDING = 1e-3  # of the divisors of label smoothing with class weights
_START = "_paceline_start"
_SELECTIONS = ("IndexBackward0", "MaskedSelectBackward0", "IndexSelectBackward0", "TakeBackward0")


class Divisor(NamedTuple):
    """The weight of a mean: what it was divided by."""

    weight: Tensor | float


class Mean(NamedTuple):
    """A mean that a loss adds, and whether what it was divided by depends on the data: then that is the weight of the
    loss."""

    divisor: Tensor | float
    weighs: bool


def divisor_of(loss: Tensor) -> Tensor | float | None:
    """What a scalar loss was divided by; None if its graph does not show it (a mean over all samples, a sum, a loss
    computed in a compiled graph)."""
    return next((mean.divisor for mean in means_of(loss) if mean.weighs), None)


class Proportions:
    """Warns if the means that a loss adds up are not always divided by numbers in the same proportion: then no weight
    is right for all of them, and the loss depends on how a batch is sliced."""

    def __init__(self) -> None:
        self.warn: Callable[[str], object] | None = None
        self.said: str | None = None  # on this rank; only rank 0 logs it
        self.over_samples: list[bool] = []  # the means whose count is smaller for a half of a batch
        self._first: list[float] | None = None
        self._changed: Any = False
        self._added = 0

    def add(self, means: list[Mean]) -> None:
        reference = next(number for number, mean in enumerate(means) if mean.weighs)
        divisors = [mean.divisor for mean in means]
        if self._first is None:
            numbers = [float(divisor) for divisor in divisors]
            several = len({float(mean.divisor) for mean in means if mean.weighs}) > 1
            self._changed = several and not all(numbers)
            self._first = numbers if all(numbers) else None
        elif len(self._first) == len(means):
            ratio = divisors[reference] / self._first[reference]
            known = self.over_samples if len(self.over_samples) == len(means) else None
            for number, (mean, first) in enumerate(zip(means, self._first, strict=True)):
                if number == reference or not (mean.weighs if known is None else known[number]):
                    continue
                expected: Any = ratio * first
                other = mean.divisor
                changed: Any = abs(other - expected) > _ROUNDING * abs(expected)
                if known is None and isinstance(other, Tensor) and not other.is_floating_point():
                    changed &= other != first  # a constant may be the size of a weight, in a penalty
                self._changed = self._changed | changed
        self._added += 1
        waits = isinstance(self._changed, Tensor) and self._changed.device.type != "cpu"  # for the device
        if self.is_listening and (not waits or self._added % _INTERVAL == 0) and self._changed:
            shown = ", ".join(f"{float(divisor):g}" for divisor in divisors)
            means_of_loss = f"{len(divisors)} means, which were divided by {shown}"
            self.say(f"The loss adds up {means_of_loss}, in another proportion than before.")

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Within this context, warn of nothing."""
        self.warn, before = None, self.warn
        try:
            yield
        finally:
            self.warn = before

    @property
    def is_listening(self) -> bool:
        """Whether a warning would be the first one."""
        return self.said is None and self.warn is not None

    def say(self, what: str) -> None:
        self.said = TrainError(
            "loss-of-slices",
            what,
            why="it has one weight, so the result depends on the number of ranks and micro-batches",
        ).text()
        if self.warn is not None:
            self.warn(self.said)


def weighted_mean(mean: Tensor, samples: int, *, divides: bool | None) -> tuple[Tensor, Tensor | float]:
    """(sum, weight) of a mean that was computed in a `LossGraph`, without its graph."""
    count = None if divides is False else divisor_of(mean)
    if count is None:
        return mean.detach() * samples, samples
    return torch.where(torch.as_tensor(count) > 0, mean.detach(), 0.0) * count, count


def means_of(loss: Tensor) -> list[Mean]:
    """All means that a loss adds up, in the order of its terms."""
    found: list[Mean] = []
    todo: list[Any] = [loss.grad_fn]
    left = _NODES
    while todo and left:
        node, left = todo.pop(), left - 1
        name = type(node).__name__
        mean = _mean_at(node, name)
        if mean is not None:
            found.append(mean)
        elif name in _SAME_VALUE or name in _LINEAR or _reduces_stack(node, name):
            todo += [inner for inner, _ in reversed(node.next_functions) if inner is not None]
    return found


def _mean_at(node: Any, name: str) -> Mean | None:
    if name in _COUNTED:
        return Mean(_counted_targets(node), True) if node._saved_reduction == _MEAN else None
    if name == "DivBackward0" and _is_count(node.next_functions[1][0]):
        divisor = _divisor_of_quotient(node)
    elif name == "MulBackward0" and None in (node.next_functions[0][0], node.next_functions[1][0]):
        divisor = _inverse_factor(node)
    elif name in ("MeanBackward0", "MeanBackward1") and not _reduces_stack(node, name):
        return Mean(float(node._saved_self_sym_numel), _selects_before(node))
    elif getattr(node, "_saved_reduction", None) == _MEAN:
        return Mean(float(node._saved_self.numel()), _selects_before(node))
    else:
        return None
    return None if divisor is None else Mean(divisor, True)


def _inverse_factor(node: Any) -> Tensor | None:
    """The divisor of sum * (1 / count)."""
    is_first = node.next_functions[1][0] is None
    inner = _skip_same_value(node.next_functions[not is_first][0])
    if type(inner).__name__ not in _SUMS or _is_penalty(inner):
        return None
    factor = node._saved_other if is_first else node._saved_self
    if factor is None or factor.numel() != 1 or factor.dtype not in _FACTORS:  # it may be a Python number
        return None
    divisor = 1 / factor.detach().reshape(()).double()
    divisor = torch.where(torch.isfinite(divisor), divisor, 0.0)
    node.register_hook(_NoGradientWithoutWeight(divisor))
    return torch.where((divisor.round() - divisor).abs() < _ROUNDED * divisor, divisor.round(), divisor)


def _is_penalty(node: Any, depth: int = 6) -> bool:
    """Whether this is computed from parameters alone, element by element."""
    name = type(node).__name__
    if name == "AccumulateGrad":
        return isinstance(node.variable, nn.Parameter)
    inner = [each for each, _ in node.next_functions if each is not None]
    known = name in _SUMS or name in _SAME_VALUE or name in _LINEAR or name in _ELEMENTWISE
    return depth > 0 and known and bool(inner) and all(_is_penalty(each, depth - 1) for each in inner)


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
    if name in _SUMS and not _reduces_stack(inner, name) and not _is_penalty(inner):
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
    if type(node).__name__ not in ("SumBackward0", "MeanBackward0"):
        return False
    inner = node.next_functions[0][0]
    return type(inner).__name__ == "AccumulateGrad" and hasattr(inner.variable, _START)  # where a `LossGraph` began


def _selects_before(node: Any) -> bool:
    """Whether a mask or an index selected the elements of a mean."""
    return any(_selects(inner, 4) for inner, _ in node.next_functions)


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
    mask, on. The graph of the model is not recorded, so no activations are kept. Without `sums`, only losses of torch
    count as such: a sum may be that of targets. What is written into a buffer of `module` is not recorded."""

    def __init__(self, module: nn.Module, *, sums: bool = True) -> None:
        super().__init__()
        self._module, self._buffers = module, set[int]()
        self._started, self._starts = False, _STARTS if sums else _LOSSES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._starts and _starts(func, args, kwargs) and not torch.is_grad_enabled():
            self._started = True
            first = _first(func)
            if args[first].grad_fn is None:
                start = args[first].detach().requires_grad_()
                setattr(start, _START, True)
                args = (*args[:first], start, *args[first + 1 :])
        elif not self._started or not _has_graph(args) or self._writes_buffer(func, args):
            return func(*args, **kwargs) if kwargs else func(*args)
        with torch.enable_grad():
            return func(*args, **kwargs) if kwargs else func(*args)

    def _writes_buffer(self, func: Any, args: Any) -> bool:
        name = func.__name__
        in_place = (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem"))
        if in_place and not self._buffers:
            self._buffers = {id(buffer) for buffer in self._module.buffers()}
        return in_place and id(args[0]) in self._buffers


def _has_graph(args: Any) -> bool:
    return any(
        each.grad_fn is not None if isinstance(each, Tensor) else isinstance(each, (list, tuple)) and _has_graph(each)
        for each in args
    )


def _first(func: Any) -> int:
    """The position of the first tensor."""
    return int(func is torch.einsum)


def _starts(func: Any, args: Any, kwargs: Any) -> bool:
    given = args[_first(func) :]
    if not given or not isinstance(given[0], Tensor) or not given[0].is_floating_point():
        return False
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(each, Tensor) and each.dtype is torch.bool for each in index)
    return func not in (Tensor.sum, torch.sum, Tensor.mean, torch.mean) or (
        len(args) == 1 and "dim" not in (kwargs or ())
    )


_REDUCTIONS = ("sum", "mean", "masked_select", "index_select", "take", "nansum", "nanmean")
_LOSSES = {
    functional.cross_entropy,
    functional.nll_loss,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
}
_STARTS = {
    *_LOSSES,
    *(getattr(owner, name) for owner in (torch, Tensor) for name in _REDUCTIONS),
    torch.einsum,
    Tensor.__getitem__,
}
