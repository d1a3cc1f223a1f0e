"""Losses that a custom loop computes itself: `trainer.backward(loss, weight=…)`.

The weight is the number of samples or tokens that the loss is a mean of. DDP reduces gradients only after its own
forward, so those of such a loss are averaged here, before the optimizer step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from paceline.errors import TrainError
from paceline.models.divisor import Divisor
from paceline.models.losses import Loss
from paceline.models.model_call import read_loss

Group = torch_dist.ProcessGroup | None
_BUCKET_BYTES = 64 << 20


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


def hook_error(name: str) -> TrainError:
    return TrainError(
        "comm-hook",
        f"trainer.backward(loss, weight=…) was called, but {name} reduces the gradients.",
        why="hooks are called by DDP, which reduces the gradients of trainer.forward(batch) only",
        fix="compute the loss from trainer.forward(batch), with loss_fn=… or criterion=…; or leave out the hook",
    )


@torch.no_grad()
def average_gradients(module: nn.Module, device: torch.device, group: Group) -> None:
    """Average the gradients over the ranks of a group. Collective."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    reached = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
    torch_dist.all_reduce(reached, group=group)
    held = [p for p, count in zip(parameters, reached.tolist(), strict=True) if count]
    for parameter in held:
        if parameter.grad is None:  # another rank has a gradient
            parameter.grad = torch.zeros_like(parameter)
    bucket: list[Tensor] = []
    for gradient in [p.grad for p in held if p.grad is not None]:
        if bucket and (bucket[0].dtype != gradient.dtype or _bytes([*bucket, gradient]) > _BUCKET_BYTES):
            _average(bucket, group)
            bucket = []
        bucket.append(gradient)
    if bucket:
        _average(bucket, group)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _average(bucket: list[Tensor], group: Group) -> None:
    flat: Any = _flatten_dense_tensors(bucket)
    torch_dist.all_reduce(flat, group=group)
    flat.div_(torch_dist.get_world_size(group))
    for gradient, reduced in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
        gradient.copy_(reduced)
