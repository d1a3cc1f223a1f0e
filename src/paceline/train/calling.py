"""How a batch reaches the model, and how the loss comes back.

Decided once, from the first batch, by a rule that is printed:

- `loss_fn(model, batch)` or a `criterion` over (input, target), where one was given;
- a tuple or list is spread where its length equals the number of arguments that forward requires;
- a dict is spread where all its keys are forward's parameters;
- else the model gets the batch as it is. What could be meant two ways is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from paceline.errors import TrainError
from paceline.models.loss import Loss

Call = Callable[[Any], Any]


def choose_call(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    criterion: Callable[..., Any] | None,
) -> tuple[Call, str]:
    """A function from a batch to what the loss is read from, and the rule in words."""
    if loss_fn is not None:
        return lambda batch: loss_fn(model, batch), "loss_fn(model, batch)"
    if criterion is not None:
        _require_pair(batch)
        return lambda batch: criterion(model(batch[0]), batch[1]), "criterion(model(input), target)"
    if isinstance(batch, Mapping):
        return _choose_for_dict(model, batch)
    if isinstance(batch, (tuple, list)):
        return _choose_for_sequence(model, batch)
    return lambda batch: model(batch), "model(batch)"


def _require_pair(batch: Any) -> None:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise TrainError(
            "no-pair",
            f"A criterion needs batches of (input, target), but this one is {_describe(batch)}.",
            fix="give loss_fn=lambda model, batch: … instead",
        )


def _choose_for_dict(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Call, str]:
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [key for key in batch if takes_any or key in parameters]
    if len(known) == len(batch):
        return lambda batch: model(**batch), f"model({', '.join(f'{key}=…' for key in batch)})"
    if known:
        raise TrainError(
            "ambiguous-batch",
            f"Of the batch's keys, forward knows {', '.join(known)} but not "
            f"{', '.join(key for key in batch if key not in known)}.",
            fix="leave the others out of the samples, or give loss_fn=lambda model, batch: …",
        )
    return _whole(model), "model(batch)"


def _choose_for_sequence(model: nn.Module, batch: Any) -> tuple[Call, str]:
    positional = [
        p for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    required = sum(p.default is p.empty for p in positional)
    if len(batch) == required:
        return lambda batch: model(*batch), f"model(*batch), {required} arguments"
    if required < len(batch) <= len(positional):
        raise TrainError(
            "ambiguous-batch",
            f"The batch is {_describe(batch)}, and forward takes {required} to {len(positional)} arguments.",
            why="it could be spread over them, or be the first of them",
            fix="give samples as dicts with forward's names, or loss_fn=lambda model, batch: …",
        )
    return _whole(model), "model(batch)"


def _whole(model: nn.Module) -> Call:
    """The model on a container as it is; if it can't take that, the error says how the container got there."""

    def call(batch: Any) -> Any:
        try:
            return model(batch)
        except TypeError as error:
            error.add_note(
                f"paceline: the model got the whole batch, {_describe(batch)}, as its one argument. "
                "For (input, target) batches give criterion=…; else loss_fn=lambda model, batch: …"
            )
            raise

    return call


def _describe(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


def read_loss(result: Any) -> tuple[Tensor, Tensor | float | None]:
    """(sum, weight) from a Loss; (mean, None) from a scalar, or from a dict or object with `loss`."""
    if isinstance(result, Loss):
        return _scalar(result.sum), result.weight
    inner = result.get("loss", result) if isinstance(result, Mapping) else getattr(result, "loss", result)
    if isinstance(inner, Loss):
        return _scalar(inner.sum), inner.weight
    return _scalar(inner), None


def _scalar(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise TrainError(
        "no-loss",
        f"The model's result is {seen}, which is no loss.",
        why="a loss is a scalar, a dict or object with `loss`, or a paceline.Loss(sum, weight)",
        fix="return one of these from forward, or give criterion=… or loss_fn=lambda model, batch: …",
    )
