"""How the model is called on a batch, and how the loss is read from its result.

The rule is chosen from the first batch and printed:

- `loss_fn(model, batch)`, or `criterion` over (input, target), if given;
- a tuple or list is unpacked if its length equals the number of required arguments of forward;
- a dict is unpacked if all its keys are parameters of forward;
- otherwise the model receives the batch itself. An ambiguous batch is an error.

A mean is weighted by what it was divided by (`divisor.py`), otherwise by its samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paceline.errors import TrainError
from paceline.models import huggingface
from paceline.models.losses import IGNORE_INDEX, Loss
from paceline.models.usage_errors import explain_criterion
from paceline.run.user_frame import place_of

_TARGETS = ("targets", "labels", "target", "label")
_OUTPUTS = ("outputs", "logits", "output")


# A function of the model and a batch. The model is an argument because DataParallel runs replicas of it.
ModelCall = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class CallRule:
    """How the model is called on a batch."""

    rule: str
    loss: ModelCall  # returns the result that contains the loss
    outputs: ModelCall  # returns the outputs, called without targets if there are any
    criterion: Callable[..., Any] | None = None


def infer_call(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Any] | None, criterion: Callable[..., Any] | None
) -> CallRule:
    outputs = choose_outputs(model, batch)
    if loss_fn is not None:
        return CallRule("loss_fn(model, batch)", loss_fn, outputs)
    if criterion is not None:
        _require_pair(batch)
        _require_mean(criterion)
        return CallRule("criterion(model(input), target)", _criterion_call(criterion), outputs, criterion)
    if isinstance(batch, Mapping):
        return CallRule(*_choose_for_dict(model, batch), outputs)
    if isinstance(batch, (tuple, list)):
        return CallRule(*_choose_for_sequence(model, batch), outputs)
    return CallRule("model(batch)", _plain, outputs)


def _plain(model: Any, batch: Any) -> Any:
    return model(batch)


def _require_pair(batch: Any) -> None:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise TrainError("no-pair", f"A criterion requires (input, target) batches, got {_describe(batch)}.")


def _require_mean(criterion: Any) -> None:
    reduction = getattr(criterion, "reduction", "mean")
    if reduction not in ("mean", "batchmean"):  # that of KLDivLoss: a mean over samples
        raise TrainError("criterion-not-a-mean", f"Unsupported reduction={reduction!r} of {type(criterion).__name__}.")


def _criterion_call(criterion: Callable[..., Any]) -> ModelCall:
    def call(model: Any, batch: Any) -> Any:
        outputs = model(batch[0])
        try:
            if torch.is_grad_enabled():
                return criterion(outputs, batch[1])
            return loss_of_outputs(criterion, outputs, batch[1])
        except Exception as error:
            explain_criterion(error, criterion, model, outputs, batch[1])
            raise

    return call


def stateful(*losses: Any) -> nn.Module | None:
    """The criterion or `loss_fn` if it is a module of the user with buffers or parameters, which belong to the run.
    Buffers of torch's own, such as class weights, are settings."""
    for loss in losses:
        if isinstance(loss, nn.Module) and not type(loss).__module__.startswith("torch.") and loss.state_dict():
            return loss
    return None


def loss_of_outputs(criterion: Callable[..., Any], outputs: Any, targets: Any) -> Any:
    """The criterion on outputs that were computed without gradients, with a graph that shows its divisor."""
    module = stateful(criterion)
    before = {} if module is None else {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.enable_grad():
        shown = criterion(tree_map_only(Tensor, _as_leaf, outputs), targets)
    if module is not None:  # its state may change with gradients only
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
        criterion(outputs, targets)
    return shown


def _as_leaf(output: Tensor) -> Tensor:
    return output.detach().requires_grad_(output.is_floating_point() or output.is_complex())


def _choose_for_dict(model: nn.Module, batch: Mapping[str, Any]) -> tuple[str, ModelCall]:
    known = _forward_keys(model, batch)
    if len(known) == len(batch):
        rule = f"model({', '.join(f'{key}=…' for key in batch)})"
        labels = batch.get("labels")
        shift = huggingface.label_shift(model) if isinstance(labels, Tensor) and labels.dim() == 2 else None
        if shift and labels is not None and labels.shape[1] <= shift:
            raise TrainError(
                "no-labels-left",
                f"Labels of shape {tuple(labels.shape)} leave no token to predict: the model shifts them by one.",
            )
        if shift is None or model._compiled_call_impl is None:  # only a compiled graph does not show its divisor
            return rule, lambda model, batch: model(**batch)
        return f"{rule}; mean over tokens, weighted by counted labels", _token_mean(shift)
    if known:
        raise TrainError(
            "ambiguous-batch",
            f"forward() has no parameter for these keys of the batch: "
            f"{', '.join(key for key in batch if key not in known)} (it takes {', '.join(known)}).",
            fix="remove these keys from the samples, or pass loss_fn=lambda model, batch: …",
        )
    return "model(batch)", _call_with_batch


def _forward_keys(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """The keys of a batch that forward() takes."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [key for key in batch if takes_any or key in parameters]


def _token_mean(first: int) -> ModelCall:
    def call(model: Any, batch: Any) -> Loss:
        labels = batch["labels"]
        weight = (labels[:, first:] != IGNORE_INDEX).sum()
        # A mean over no tokens would be 0/0, with a NaN gradient even at weight zero: count one token instead.
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
    required, given = sum(p.default is p.empty for p in positional), len(batch)
    is_optional = required < given <= len(positional)
    # Whose last argument is a target: no model takes a list of inputs and targets as its input.
    if given == required or (is_optional and positional[given - 1].name in _TARGETS):
        return f"model(*batch), {given} arguments", lambda model, batch: model(*batch)
    if is_optional:
        raise TrainError(
            "ambiguous-batch",
            f"Ambiguous batch: {_describe(batch)}, while forward() takes {required} to {len(positional)} arguments.",
            why="it could be unpacked into the arguments, or be the first argument",
            fix="use dict samples with the parameter names of forward(), or pass loss_fn=lambda model, batch: …",
        )
    return "model(batch)", _call_with_batch


def _call_with_batch(model: Any, batch: Any) -> Any:
    """Call the model with the batch as its only argument; a TypeError gets a note that says so."""
    try:
        return model(batch)
    except TypeError as error:
        advice = (
            "For (input, target) batches pass criterion=… to the Trainer; if forward() returns a dict, "
            "loss_fn=lambda model, batch: criterion(model(batch[0])[key], batch[1])"
        )
        if isinstance(batch, Mapping):
            names = ", ".join(inspect.signature(model.forward).parameters)
            advice = f"Name the keys ({', '.join(map(str, batch))}) like the parameters of forward() ({names})"
        error.add_note(
            f"paceline: without a criterion, the model is called with the batch, {_describe(batch)}, as its only "
            f"argument. {advice}"
        )
        raise
    except AttributeError as error:
        if f"'{type(batch).__name__}' object has no attribute" not in str(error):
            raise
        raise TrainError(
            "ambiguous-batch",
            f"forward() of {type(model).__name__}{place_of(getattr(model, 'forward', None))} was called with the "
            f"batch, {_describe(batch)}: {error}.",
            why="without a criterion, the model gets the batch as its only argument, labels included",
            fix="pass loss_fn=lambda model, batch: model(batch[0]), or criterion=… for (input, target) batches",
        ) from error


def choose_outputs(model: nn.Module, batch: Any) -> ModelCall:
    """For predictions: call the model without the targets, if the batch shows which they are."""
    if isinstance(batch, Mapping):
        wanted = [key for key in _forward_keys(model, batch) if key not in _TARGETS]
        if wanted:
            return lambda model, batch: model(**{key: batch[key] for key in wanted})
    if isinstance(batch, (tuple, list)) and len(batch) in (1, 2):
        return lambda model, batch: model(batch[0])
    return _plain


def targets_in(batch: Any) -> Any:
    """The targets of a batch: the second of a pair, or a dict's targets or labels; else None."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in _TARGETS if key in batch), None)
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None


def outputs_in(result: Any) -> Any:
    """The outputs in a result that also contains the loss; else None."""
    if isinstance(result, Mapping):
        return next((result[key] for key in _OUTPUTS if key in result), None)
    return next((getattr(result, key) for key in _OUTPUTS if hasattr(result, key)), None)


def _describe(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a {type(batch).__name__}"


def read_loss(
    result: Any, call: CallRule | None = None
) -> tuple[Tensor, Tensor | float | None, Mapping[str, Any] | None]:
    """(sum, weight, metrics) from a Loss; (mean, None, …) from a scalar; either from a dict or object with `loss`."""
    if type(result) is Loss:
        return _scalar(result.sum, call), result.weight, None
    if isinstance(result, Tensor):
        return _scalar(result, call), None, None
    inner, weight, metrics = (_part(result, name) for name in ("loss", "weight", "metrics"))
    if isinstance(inner, Loss):
        return _scalar(inner.sum, call), inner.weight, metrics
    value = _scalar(result if inner is None else inner, call)
    if weight is None:
        return value, None, metrics
    if isinstance(weight, Tensor):
        weight = weight.reshape(())
    return value * weight, weight, metrics


def _part(result: Any, name: str) -> Any:
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def _scalar(value: Any, call: CallRule | None) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        # Half precision is too coarse for sums over many micro-batches.
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        return wide if wide.dim() == 0 else wide.reshape(())
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    what = f"Expected a loss, got {got}."
    fix = f"return {'its mean, or paceline.Loss(sum, weight)' if isinstance(value, Tensor) else 'the scalar tensor'}"
    if call is not None and call.rule.startswith(("loss_fn", "criterion")):
        what = f"Expected a loss from {call.rule}{place_of(call.criterion or call.loss)}, got {got}."
    elif call is not None:
        fix = "return the loss from forward(), or pass criterion=… or loss_fn=lambda model, batch: … to the Trainer"
    raise TrainError(
        "no-loss",
        what,
        why="item(), float() and numpy() cut it off from the parameters"
        if isinstance(value, (int, float))
        else "a loss is a scalar tensor, a dict or object with `loss`, or a paceline.Loss(sum, weight)",
        fix=fix,
    )
