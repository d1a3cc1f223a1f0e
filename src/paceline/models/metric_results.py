"""What a metric function may return for a batch, and how its results become one value.

| result | value over all batches and ranks |
|---|---|
| a tensor with a value per sample, token, pixel, … | the mean over all of them |
| `Loss(sum, weight)` | Σsum / Σweight |
| a number (F1, R², a mean) | none in general: the function must be called once, on the outputs of all samples |
| a dict of these | each of them, as `name_key` |

A single element may be either a number or the only value of its batch; other results decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.errors import TrainError
from paceline.models.losses import Loss

ResultKind = Literal["a Loss", "a tensor of values", "a number"]
PER_VALUE: ResultKind = "a tensor of values"
PER_BATCH: ResultKind = "a number"
KINDS: tuple[ResultKind, ...] = ("a Loss", PER_VALUE, PER_BATCH)


class MetricResult(NamedTuple):
    kind: ResultKind | None  # None: a single element, either a number or a tensor of values
    sum: Tensor  # of a number: the number itself
    weight: Tensor | float


def read_metric(name: str, result: Any, samples: int) -> Iterator[tuple[str, MetricResult]]:
    """The results of the metric `name` for a batch, by the name under which they are recorded."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield f"{name}_{key}", _read(f"{name}_{key}", value, samples)
    else:
        yield name, _read(name, result, samples)


def _read(name: str, result: Any, samples: int) -> MetricResult:
    if isinstance(result, Loss):
        return MetricResult("a Loss", _tensor(name, result.sum).sum(), _tensor(name, result.weight).sum())
    if isinstance(result, tuple) or (isinstance(result, list) and len(result) != samples):
        raise _refused(name, f"a {type(result).__name__} of {len(result)}")
    values = _tensor(name, result)
    total = values.double().sum()
    if values.numel() != 1:
        return MetricResult(PER_VALUE, total, values.numel())
    is_number = values.dim() == 0 and samples > 1
    return MetricResult(PER_BATCH if is_number else None, total, 1.0)


def _tensor(name: str, value: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise _refused(name, f"a {type(value).__name__}") from None
    if tensor.is_complex():
        raise _refused(name, "complex numbers")
    return tensor


def _refused(name: str, got: str) -> TrainError:
    return TrainError(
        "metric-result",
        f"Metric {name!r} returned {got}.",
        why="a metric returns a tensor with one value per sample, a paceline.Loss(sum, weight), a number, or a dict of "
        "these",
        fix="for a sum and its count, return paceline.Loss(sum, weight)",
    )


def require_one_kind(name: str, kinds: list[ResultKind]) -> ResultKind:
    """The kind of a metric, from those of its batches on all ranks."""
    if len(kinds) > 1:
        raise TrainError(
            "metric-kinds",
            f"Metric {name!r} returned {kinds[0]} for one batch and {kinds[1]} for another.",
            why="they are combined over batches and ranks in different ways",
            fix="return the same kind of result for every batch, whatever it contains",
        )
    return kinds[0] if kinds else PER_BATCH


def weigh_metric(name: str, value: Any, weight: Any) -> tuple[Any, Any]:
    """(sum, weight) of a metric that the model returns with its loss: a mean, weighted as the loss is, or a Loss."""
    if isinstance(value, Loss):
        return value.sum, value.weight
    return require_number(name, value) * weight, weight


def require_number(name: str, value: Any) -> Any:
    """A scalar tensor as it is, any other number as a float."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise TrainError("not-a-number", f"Expected a scalar for {name!r}, got {got}.") from None
