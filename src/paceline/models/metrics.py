"""What a metric function may return for a batch, how its results become one value, and the metrics of recipes.

docs/guides/trainer.md lists the results and their values. A single element may be either a number or the only value of
its batch; other results decide.

A recipe selects metrics by name: `metrics: [accuracy, perplexity]`. Each of them is a sum over the counted samples,
tokens or elements of a batch and their number, in float64, so the value over all batches and ranks does not depend on
how the data is divided. Targets equal to -100, or to the `ignore_index` of the
criterion or the model, are not counted. Labels of a Hugging Face model that shifts them are shifted here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.config.components import METRICS
from paceline.errors import TrainError
from paceline.models import huggingface
from paceline.models.losses import IGNORE_INDEX, Loss
from paceline.models.spec import declared_spec

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
    return TrainError("metric-result", f"Metric {name!r} returned {got}.")


def require_one_kind(name: str, kinds: list[ResultKind]) -> ResultKind:
    """The kind of a metric, from those of its batches on all ranks."""
    if len(kinds) > 1:
        raise TrainError(
            "metric-kinds", f"Metric {name!r} returned {kinds[0]} for one batch and {kinds[1]} for another."
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


class UnfitError(Exception):
    """Why a metric can't be computed from the outputs and targets of a batch."""

    fix = (
        "return such outputs from forward(), as `logits` or `outputs` beside the loss, or write your own: "
        'metrics: ["my_module:my_metric"], a function of (outputs, targets)'
    )


class UnclearError(UnfitError):
    fix = "set model.model_spec = paceline.ModelSpec(class_dim=-1) if it is the last, class_dim=1 if it is the second"


_CLASSES_IN_DIM_1 = (functional.cross_entropy, functional.nll_loss, nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


@dataclass
class NamedMetric:
    """A metric of `METRICS`, as a function of outputs and targets."""

    name: str
    measure: Callable[[Tensor, Tensor, NamedMetric], Loss]
    finish: Callable[[float], float] = float  # of the mean over all batches and ranks
    shift: int = 0  # by how many tokens the model shifts labels
    ignored: frozenset[int] = frozenset({IGNORE_INDEX})
    class_dim: int | None = None  # 1 or -1, once known, for a batch whose shapes leave it open

    def for_model(self, model: nn.Module | None, criterion: Any) -> NamedMetric:
        """The metric of that model, which may shift labels, and ignore others than those equal to -100."""
        indices = [getattr(part, "ignore_index", None) for part in (model, criterion)]
        ignored = self.ignored.union(index for index in indices if isinstance(index, int))
        shift, spec = huggingface.label_shift(model), declared_spec(model)
        class_dim = spec.class_dim if spec else None if shift is None else -1
        if getattr(type(criterion), "forward", criterion) in _CLASSES_IN_DIM_1:
            class_dim = 1
        return replace(self, shift=shift or 0, ignored=ignored, class_dim=class_dim)

    def __call__(self, outputs: Any, targets: Any) -> Loss:
        try:
            if not isinstance(outputs, Tensor):
                raise UnfitError(f"the outputs are a {type(outputs).__name__}")
            if not isinstance(targets, Tensor):
                raise UnfitError(f"the targets are a {type(targets).__name__}")
            if self.shift and targets.dim() == 2 and outputs.dim() == 3:
                outputs, targets = outputs[:, : -self.shift], targets[:, self.shift :]
            return self.measure(outputs, targets, self)
        except UnfitError as error:
            raise TrainError(
                "metric-unfit",
                f"Metric {self.name!r} can't be computed: {error}.",
                why=f"it needs {METRICS.facts(self.name).needs}",
                fix=error.fix,
            ) from None


def _class_rows(outputs: Tensor, targets: Tensor, metric: NamedMetric) -> tuple[Tensor, Tensor]:
    """The logits and the target of each sample or token that is counted, as rows."""
    shapes = f"outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}"
    if targets.is_floating_point() or targets.is_complex():
        raise UnfitError(f"the targets are {str(targets.dtype).removeprefix('torch.')}, not classes ({shapes})")
    if not outputs.is_floating_point():
        raise UnfitError(f"the outputs are {str(outputs.dtype).removeprefix('torch.')}, not logits ({shapes})")
    last = outputs.dim() - 1
    shape_without = {dim: outputs.shape[:dim] + outputs.shape[dim + 1 :] for dim in {last, min(1, last)} if last >= 0}
    fitting = [dim for dim, shape in shape_without.items() if shape == targets.shape]
    if not fitting:
        raise UnfitError(shapes)
    if len(fitting) > 1 and metric.class_dim is None:
        raise UnclearError(f"{shapes}, so classes may be the second or the last dim")
    if len(fitting) == 1 and last > 1:  # for later batches, which may have as many tokens as classes
        metric.class_dim = -1 if fitting[0] == last else 1
    dim = fitting[0] if len(fitting) == 1 else (metric.class_dim or 0) % outputs.dim()
    if (classes := outputs.shape[dim]) < 2:
        raise UnfitError(f"there is one logit for each target ({shapes})")
    rows = outputs.movedim(dim, -1).reshape(-1, classes)
    flat = targets.reshape(-1).long()
    counted = torch.ones_like(flat, dtype=torch.bool)
    for index in metric.ignored:
        counted &= flat != index
    return rows[counted], flat[counted]


def _mean_of(values: Tensor) -> Loss:
    return Loss(values.double().sum(), values.numel())


def _hits(outputs: Tensor, targets: Tensor, metric: NamedMetric, k: int) -> Loss:
    rows, classes = _class_rows(outputs, targets, metric)
    if rows.shape[-1] < k:
        raise UnfitError(f"there are only {rows.shape[-1]} classes")
    return _mean_of((rows.topk(k, dim=-1).indices == classes[:, None]).any(-1))


def _negative_log_likelihood(outputs: Tensor, targets: Tensor, metric: NamedMetric) -> Loss:
    return _mean_of(functional.cross_entropy(*_class_rows(outputs, targets, metric), reduction="none"))


def _error(outputs: Tensor, targets: Tensor, metric: NamedMetric, power: int) -> Loss:
    if outputs.shape != targets.shape:  # broadcasting would compare every output with every target
        raise UnfitError(f"outputs have shape {tuple(outputs.shape)}, targets {tuple(targets.shape)}")
    if not (outputs.is_floating_point() and targets.is_floating_point()):
        kinds = [str(each.dtype).removeprefix("torch.") for each in (outputs, targets)]
        raise UnfitError(f"the outputs are {kinds[0]}, the targets {kinds[1]}")
    return _mean_of((outputs.double() - targets.double()).abs() ** power)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


for _metric in (
    NamedMetric("accuracy", partial(_hits, k=1)),
    NamedMetric("top5_accuracy", partial(_hits, k=5)),
    NamedMetric("perplexity", _negative_log_likelihood, _exp),
    NamedMetric("mse", partial(_error, power=2)),
    NamedMetric("rmse", partial(_error, power=2), math.sqrt),
    NamedMetric("mae", partial(_error, power=1)),
):
    METRICS.implement(_metric.name)(_metric)
