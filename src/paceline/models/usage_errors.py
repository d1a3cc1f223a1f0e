"""Names common mistakes with models, criteria and loss functions, before training or when they fail."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError, TrainError
from paceline.run.user_frame import place_of, running_user_frame

_ELEMENTWISE = (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss)


def check_model(model: Any) -> None:
    """Refuse classes and names."""
    if isinstance(model, nn.Module):
        return
    fix = f"create it: {model.__name__}(…)" if isinstance(model, type) else "pass a module, e.g. nn.Linear(8, 2)"
    raise ModelError("not-a-module", f"Expected a torch.nn.Module as the model, got {_given(model)}.", fix=fix)


def check_criterion(name: str, function: Any) -> None:
    """Refuse classes, names, and functions that cannot be called with two arguments."""
    if function is None:
        return
    if isinstance(function, type) or not callable(function):
        example = f"{function.__name__}()" if isinstance(function, type) else "nn.CrossEntropyLoss()"
        what = f"Expected a function or a module as {name}, got {_given(function)}."
        raise ModelError("not-a-criterion", what, fix=f"create it: {name}={example}")
    if (parameters := _required_parameters(function)) is not None:
        takes = "(model, batch)" if name == "loss_fn" else "(output, target)"
        raise ModelError(
            "not-a-criterion",
            f"{name}{place_of(function)} must accept {takes}; its required parameters are ({', '.join(parameters)}).",
        )


def _given(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"the {type(value).__name__} {value!r:.60}"


def _required_parameters(function: Any) -> list[str] | None:
    """Its required parameters, if they do not match two arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None  # a builtin
    try:
        signature.bind(None, None)
    except TypeError:
        return [each.name for each in signature.parameters.values() if each.default is each.empty]
    return None


def explain_criterion(error: Exception, criterion: Any, model: Any, outputs: Any, targets: Any) -> None:
    """Add what the criterion received to its error; raise another one if the model returned nothing."""
    forward = f"forward() of {type(model).__name__}{place_of(getattr(model, 'forward', None))}"
    if outputs is None:
        raise ModelError("no-output", f"{forward} returned None.") from error
    name = type(criterion).__name__ if isinstance(criterion, nn.Module) else "the criterion"
    received = f"output: {_kind(outputs)} from {forward}; target: {_kind(targets)}"
    error.add_note(f"paceline: {name} received {received}")
    if hint := _hint(str(error), outputs, targets):
        error.add_note(f"paceline: {hint}")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else "")


def _hint(message: str, outputs: Any, targets: Any) -> str:
    if not isinstance(outputs, Tensor):
        return "return a tensor from forward(), or pass loss_fn=lambda model, batch: … to select a part of the output"
    if not isinstance(targets, Tensor):
        return "return the target as a number or a tensor from the dataset"
    if "out of bounds" in message and targets.numel() and outputs.dim() > 1:
        low, high, classes = int(targets.min()), int(targets.max()), outputs.shape[1]
        return f"the labels range from {low} to {high}, but the output has {classes} classes: 0 to {classes - 1}"
    if targets.is_floating_point() and ("Long" in message or "Int" in message):
        return "class labels must be integers: return targets.long() from the dataset"
    if targets.dim() == outputs.dim() == 2 and targets.shape[1] == 1 and "multi-target" in message:
        return "class labels must have shape (batch,): use targets.squeeze(1)"
    return ""


def require_trainable(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainError(
            "nothing-to-train", f"The model {type(model).__name__} has no parameters that require gradients."
        )


@contextmanager
def explain_no_gradient(model: nn.Module) -> Iterator[None]:
    """A backward without a graph: name what may have cut it."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad and does not have a grad_fn" not in str(error):
            raise
        require_trainable(model)
        raise TrainError(
            "no-gradient",
            "The loss does not depend on any trainable parameter.",
            why=f"forward() of {type(model).__name__}{place_of(model.forward)} or the loss uses detach(), item(), "
            "torch.no_grad() or an operation that has no gradient, such as argmax",
        ) from error


class Broadcasts(TorchFunctionMode):
    """Finds an elementwise loss whose output and target broadcast to more elements than either of them has, as (8, 1)
    and (8,) do."""

    def __init__(self, criterion: Any) -> None:
        super().__init__()
        self._name = type(criterion).__name__ if isinstance(criterion, nn.Module) else None
        self.found: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ELEMENTWISE or args[0].shape == args[1].shape:
            return func(*args, **kwargs) if kwargs else func(*args)
        with warnings.catch_warnings():  # torch's own, which would name a line of paceline
            warnings.simplefilter("ignore")
            result = func(*args, **kwargs)
        output, target = args[:2]
        shape = torch.broadcast_shapes(output.shape, target.shape)
        if shape.numel() > max(output.numel(), target.numel()) and self.found is None:
            fix = "make their shapes equal"
            if output.dim() == target.dim() + 1 and output.shape[-1] == 1:
                fix = "squeeze the output (.squeeze(-1)), or use targets.unsqueeze(-1)"
            self.found = (
                f"output {tuple(output.shape)} and target {tuple(target.shape)} broadcast to {tuple(shape)} in "
                f"{self._name or func.__name__}: every output is compared with every target; {fix} "
                f"({running_user_frame()})"
            )
        return result
