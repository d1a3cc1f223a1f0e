"""How a batch reaches the model, and how the loss comes back.

Decided once, from the first batch, by a rule that is printed:

- `loss_fn(model, batch)` or a `criterion` over (input, target), where one was given;
- a tuple or list is spread where its length equals the number of arguments that forward requires;
- a dict is spread where all its keys are forward's parameters;
- else the model gets the batch as it is. What could be meant two ways is an error.

A Hugging Face model's `.loss` over `labels` is a mean over tokens: it then weighs as many tokens as it counted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import TrainError
from paceline.models import huggingface
from paceline.models.losses import Loss

IGNORED_LABEL = -100
_TARGETS = ("targets", "labels", "target", "label")
_OUTPUTS = ("outputs", "logits", "output")


# A function of the model and a batch. The model is an argument because data parallel runs copies of it.
ModelCall = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class CallRule:
    """How this model is called on this data."""

    rule: str
    loss: ModelCall  # to what the loss is read from
    outputs: ModelCall  # to the model's outputs, the targets left out where there are any
    criterion: Callable[..., Any] | None = None
    weighed: ModelCall | None = None  # the same with the weight of what a criterion counted
    should_weigh: bool = False  # as far as this batch shows

    def as_weighed(self) -> CallRule:
        assert self.weighed is not None
        return replace(self, loss=self.weighed, rule=f"{self.rule}; weighed by the targets that count")


def infer_call(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    criterion: Callable[..., Any] | None,
) -> CallRule:
    outputs = choose_outputs(model, batch)
    if loss_fn is not None:
        return CallRule("loss_fn(model, batch)", loss_fn, outputs)
    if criterion is not None:
        _require_pair(batch)
        _require_mean(criterion)
        rule = "criterion(model(input), target)"
        plain = CallRule(rule, lambda model, batch: criterion(model(batch[0]), batch[1]), outputs, criterion)
        if not isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)) or batch[1].is_floating_point():
            return plain
        return replace(plain, weighed=_counted(criterion), should_weigh=_skips_targets(criterion, batch[1]))
    if isinstance(batch, Mapping):
        rule, call = _choose_for_dict(model, batch)
        return CallRule(rule, call, outputs)
    if isinstance(batch, (tuple, list)):
        rule, call = _choose_for_sequence(model, batch)
        return CallRule(rule, call, outputs)
    return CallRule("model(batch)", _plain, outputs)


def _plain(model: Any, batch: Any) -> Any:
    return model(batch)


def _require_pair(batch: Any) -> None:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise TrainError(
            "no-pair",
            f"A criterion needs batches of (input, target), but this one is {_describe(batch)}.",
            fix="give loss_fn=lambda model, batch: … instead",
        )


def _require_mean(criterion: Any) -> None:
    reduction = getattr(criterion, "reduction", "mean")
    if reduction != "mean":
        raise TrainError(
            "criterion-not-a-mean",
            f"The criterion {type(criterion).__name__} has reduction={reduction!r}.",
            why="a criterion's value is taken for the mean over its batch, so that ranks can be added up",
            fix="use reduction='mean'; or loss_fn=… that returns paceline.Loss(sum, weight)",
        )


def _skips_targets(criterion: Any, targets: Tensor) -> bool:
    """Whether the mean is not one over all samples: classes weigh differently, or targets are left out.

    Targets of tokens or pixels may hold some to be left out in any later batch; class numbers of whole samples hardly.
    """
    return criterion.weight is not None or targets.dim() > 1 or bool((targets == criterion.ignore_index).any())


def _counted(criterion: Any) -> ModelCall:
    """The criterion's mean with the weight that it divided by."""

    def call(model: Any, batch: Any) -> Loss:
        targets = batch[1]
        counts = targets != criterion.ignore_index
        if criterion.weight is None:
            weight = counts.sum()
        else:
            weight = (criterion.weight[targets.where(counts, 0)] * counts).sum()
        mean = criterion(model(batch[0]), targets)
        return Loss(torch.where(weight > 0, mean, 0.0) * weight, weight)

    return call


def _choose_for_dict(model: nn.Module, batch: Mapping[str, Any]) -> tuple[str, ModelCall]:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [key for key in batch if takes_any or key in parameters]
    if len(known) == len(batch):
        rule = f"model({', '.join(f'{key}=…' for key in batch)})"
        labels = batch.get("labels")
        by_tokens = isinstance(labels, Tensor) and labels.dim() == 2
        first = huggingface.first_counted_label(model) if by_tokens else None
        if first is None:
            return rule, lambda model, batch: model(**batch)
        return f"{rule}; a mean over tokens, weighed by the labels that count", _token_mean(first)
    if known:
        raise TrainError(
            "ambiguous-batch",
            f"Of the batch's keys, forward knows {', '.join(known)} but not "
            f"{', '.join(key for key in batch if key not in known)}.",
            fix="leave the others out of the samples, or give loss_fn=lambda model, batch: …",
        )
    return "model(batch)", _whole


def _token_mean(first: int) -> ModelCall:
    def call(model: Any, batch: Any) -> Loss:
        labels = batch["labels"]
        weight = (labels[:, first:] != IGNORED_LABEL).sum()
        # A mean over no tokens would be 0/0, and its gradient NaN even at weight zero: then some token stands in.
        labels = labels.clone()
        labels[:, first] = torch.where(weight == 0, 0, labels[:, first])
        mean = model(**{**batch, "labels": labels}).loss
        return Loss(mean * weight, weight)

    return call


def _choose_for_sequence(model: nn.Module, batch: Any) -> tuple[str, ModelCall]:
    positional = [
        p for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    required = sum(p.default is p.empty for p in positional)
    if len(batch) == required:
        return f"model(*batch), {required} arguments", lambda model, batch: model(*batch)
    if required < len(batch) <= len(positional):
        raise TrainError(
            "ambiguous-batch",
            f"The batch is {_describe(batch)}, and forward takes {required} to {len(positional)} arguments.",
            why="it could be spread over them, or be the first of them",
            fix="give samples as dicts with forward's names, or loss_fn=lambda model, batch: …",
        )
    return "model(batch)", _whole


def _whole(model: Any, batch: Any) -> Any:
    """The model on a container as it is; if it can't take that, the error says how the container got there."""
    try:
        return model(batch)
    except TypeError as error:
        error.add_note(
            f"paceline: the model got the whole batch, {_describe(batch)}, as its one argument. "
            "For (input, target) batches give criterion=…; else loss_fn=lambda model, batch: …"
        )
        raise


def choose_outputs(model: nn.Module, batch: Any) -> ModelCall:
    """For predictions: the inputs without their targets, where it is plain which those are."""
    if isinstance(batch, Mapping):
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        wanted = [key for key in batch if key not in _TARGETS and (takes_any or key in parameters)]
        if wanted:
            return lambda model, batch: model(**{key: batch[key] for key in wanted})
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return lambda model, batch: model(batch[0])
    return _plain


def targets_in(batch: Any) -> Any:
    """What outputs are compared with: the second of a pair, or what a dict calls so; None if there is none."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in _TARGETS if key in batch), None)
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None


def outputs_in(result: Any) -> Any:
    """The model's outputs, where it returns them beside the loss."""
    if isinstance(result, Mapping):
        return next((result[key] for key in _OUTPUTS if key in result), None)
    return next((getattr(result, key) for key in _OUTPUTS if hasattr(result, key)), None)


def _describe(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


def read_loss(result: Any) -> tuple[Tensor, Tensor | float | None, Mapping[str, Any] | None]:
    """(sum, weight, metrics) from a Loss; (mean, None, …) from a scalar; either from a dict or object with `loss`."""
    if type(result) is Loss:
        return _scalar(result.sum), result.weight, None
    if isinstance(result, Tensor):
        return _scalar(result), None, None
    inner, weight, metrics = (_part(result, name) for name in ("loss", "weight", "metrics"))
    if isinstance(inner, Loss):
        return _scalar(inner.sum), inner.weight, metrics
    value = _scalar(result if inner is None else inner)
    if weight is None:
        return value, None, metrics
    if isinstance(weight, Tensor):
        weight = weight.reshape(())
    return value * weight, weight, metrics


def _part(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def _scalar(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        # Sums over many micro-batches need more bits than half precision has.
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        return wide if wide.dim() == 0 else wide.reshape(())
    seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise TrainError(
        "no-loss",
        f"The model's result is {seen}, which is no loss.",
        why="a loss is a scalar, a dict or object with `loss`, or a paceline.Loss(sum, weight)",
        fix="return one of these from forward, or give criterion=… or loss_fn=lambda model, batch: …",
    )
