"""Losses that a custom loop computes itself: `trainer.backward(loss, weight=…)`.

The weight is the number of samples or tokens that the loss is a mean of.
"""

from __future__ import annotations

from torch import Tensor

from paceline.errors import TrainError
from paceline.models.divisor import Divisor
from paceline.models.losses import Loss
from paceline.models.model_call import read_loss


def read(loss: Tensor | Loss, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | Divisor | None]:
    """The value and its weight, for the step; the weight is None if it is not given."""
    value, own, _ = read_loss(loss)
    if own is not None:
        return value, own
    if weight is None:
        return value, None
    number = weight if isinstance(weight, Tensor) else float(weight)
    if isinstance(number, float) and not 0.0 <= number < float("inf"):
        raise TrainError(
            "no-loss",
            f"trainer.backward() got the weight {weight!r}.",
            why="the weight is the number of samples or tokens that the loss is a mean of",
            fix="pass a number that is not negative, e.g. weight=len(targets)",
        )
    return value, Divisor(number.detach().reshape(()) if isinstance(number, Tensor) else number)


def require_graph(value: Tensor) -> None:
    if not value.requires_grad:
        raise TrainError(
            "no-loss",
            "The loss passed to trainer.backward() has no autograd graph.",
            why="it was detached, or computed under torch.no_grad() or from parameters that do not require gradients",
            fix="pass the tensor that was computed from the outputs of the model",
        )


def pipeline_error() -> TrainError:
    return TrainError(
        "no-loss",
        "trainer.compute() is not available in a pipeline.",
        why="no rank has the whole model, and the loss is computed on the last stage",
        fix="use trainer.training_step(batch) with criterion=…",
    )


def mixed_error() -> TrainError:
    return TrainError(
        "not-reduced",
        "A step has losses of trainer.forward(batch) and losses with a weight of their own.",
        why="the gradients of the former are reduced in their backward, those of the latter before the optimizer step",
        fix="add the losses, or compute all losses of a step in the same way",
    )
