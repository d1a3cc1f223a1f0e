"""The metrics that a recipe selects by name: `metrics: [accuracy, perplexity]`.

Each is a sum over the counted samples, tokens or elements of a batch and their number, in float64, so the value over
all batches and ranks does not depend on how the data is divided. Targets equal to -100, or to the `ignore_index` of the
criterion or the model, are not counted. Labels of a Hugging Face model that shifts them are shifted here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.config.components import METRICS
from paceline.errors import TrainError
from paceline.models import huggingface
from paceline.models.losses import IGNORE_INDEX, Loss


class UnfitError(Exception):
    """Why a metric can't be computed from the outputs and targets of a batch."""


@dataclass(frozen=True)
class NamedMetric:
    """A metric of `METRICS`, as a function of outputs and targets."""

    name: str
    measure: Callable[[Tensor, Tensor, frozenset[int]], Loss]
    finish: Callable[[float], float] = float  # of the mean over all batches and ranks
    shift: int = 0  # by how many tokens the model shifts labels
    ignored: frozenset[int] = frozenset({IGNORE_INDEX})

    def for_model(self, model: nn.Module, criterion: Any) -> NamedMetric:
        """The metric of that model, which may shift labels, and ignore others than those equal to -100."""
        indices = [getattr(part, "ignore_index", None) for part in (model, criterion)]
        ignored = self.ignored.union(index for index in indices if isinstance(index, int))
        return replace(self, shift=huggingface.label_shift(model) or 0, ignored=ignored)

    def __call__(self, outputs: Any, targets: Any) -> Loss:
        try:
            if not isinstance(outputs, Tensor):
                raise UnfitError(f"the outputs are a {type(outputs).__name__}")
            if not isinstance(targets, Tensor):
                raise UnfitError(f"the targets are a {type(targets).__name__}")
            if self.shift and targets.dim() == 2 and outputs.dim() == 3:
                outputs, targets = outputs[:, : -self.shift], targets[:, self.shift :]
            return self.measure(outputs, targets, self.ignored)
        except UnfitError as error:
            raise TrainError(
                "metric-unfit",
                f"Metric {self.name!r} can't be computed: {error}.",
                why=f"it needs {METRICS.facts(self.name).needs}",
                fix="return such outputs from forward(), as `logits` or `outputs` beside the loss, or write your own: "
                'metrics: ["my_module:my_metric"], a function of (outputs, targets)',
            ) from None


def _class_rows(outputs: Tensor, targets: Tensor, ignored: frozenset[int]) -> tuple[Tensor, Tensor]:
    """The logits and the target of each sample or token that is counted, as rows."""
    shapes = f"outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}"
    if targets.is_floating_point() or targets.is_complex():
        raise UnfitError(f"the targets are {str(targets.dtype).removeprefix('torch.')}, not classes ({shapes})")
    if not outputs.is_floating_point():
        raise UnfitError(f"the outputs are {str(outputs.dtype).removeprefix('torch.')}, not logits ({shapes})")
    is_last = outputs.dim() >= 1 and outputs.shape[:-1] == targets.shape
    is_second = outputs.dim() >= 3 and outputs.shape[:1] + outputs.shape[2:] == targets.shape
    if is_last and is_second:
        raise UnfitError(f"{shapes}, so classes may be the second or the last dim")
    if not is_last and not is_second:
        raise UnfitError(shapes)
    classes = outputs.shape[-1 if is_last else 1]
    if classes < 2:
        raise UnfitError(f"there is one logit for each target ({shapes})")
    rows = (outputs if is_last else outputs.movedim(1, -1)).reshape(-1, classes)
    flat = targets.reshape(-1).long()
    counted = torch.ones_like(flat, dtype=torch.bool)
    for index in ignored:
        counted &= flat != index
    return rows[counted], flat[counted]


def _require_same_shape(outputs: Tensor, targets: Tensor) -> None:
    if outputs.shape != targets.shape:  # broadcasting would compare every output with every target
        raise UnfitError(f"outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}")
    if not (outputs.is_floating_point() and targets.is_floating_point()):
        kinds = [str(each.dtype).removeprefix("torch.") for each in (outputs, targets)]
        raise UnfitError(f"the outputs are {kinds[0]}, the targets {kinds[1]}")


def _mean_of(values: Tensor) -> Loss:
    return Loss(values.double().sum(), values.numel())


def _hits(outputs: Tensor, targets: Tensor, ignored: frozenset[int], k: int) -> Loss:
    rows, classes = _class_rows(outputs, targets, ignored)
    if rows.shape[-1] < k:
        raise UnfitError(f"there are only {rows.shape[-1]} classes")
    return _mean_of((rows.topk(k, dim=-1).indices == classes[:, None]).any(-1))


def _negative_log_likelihood(outputs: Tensor, targets: Tensor, ignored: frozenset[int]) -> Loss:
    return _mean_of(functional.cross_entropy(*_class_rows(outputs, targets, ignored), reduction="none"))


def _squared_error(outputs: Tensor, targets: Tensor, ignored: frozenset[int]) -> Loss:
    _require_same_shape(outputs, targets)
    return _mean_of((outputs.double() - targets.double()) ** 2)


def _absolute_error(outputs: Tensor, targets: Tensor, ignored: frozenset[int]) -> Loss:
    _require_same_shape(outputs, targets)
    return _mean_of((outputs.double() - targets.double()).abs())


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


for _metric in (
    NamedMetric("accuracy", partial(_hits, k=1)),
    NamedMetric("top5_accuracy", partial(_hits, k=5)),
    NamedMetric("perplexity", _negative_log_likelihood, _exp),
    NamedMetric("mse", _squared_error),
    NamedMetric("rmse", _squared_error, math.sqrt),
    NamedMetric("mae", _absolute_error),
):
    METRICS.implement(_metric.name)(_metric)
