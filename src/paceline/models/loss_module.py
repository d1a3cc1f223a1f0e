"""The module that DDP or FSDP wraps: the user's model together with its loss.

A custom loop may compute losses itself: `trainer.backward(loss, weight=…)`. The weight is the number of samples or
tokens that the loss is a mean of. DDP reduces gradients only after its own forward, so those of such a loss are
averaged here, before the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from paceline.errors import TrainError
from paceline.models.divisor import Divisor, LossGraph, Proportions, means_of
from paceline.models.losses import Loss
from paceline.models.model_call import CallRule, read_loss

CRITERION = "<criterion>"  # in names of parameters and buffers; no module of a user has this name


class LossModule(nn.Module):
    """The module that DDP or FSDP wraps: maps a batch to (mean, None), (mean, Divisor) or (sum, weight).

    It computes the loss too, so that a loss function may call any method of the model under the wrapper. The user's
    model is a submodule, so its parameter names get no prefixes.
    """

    result_of: Any = None  # of a pipeline: the result of a call for outputs that are known
    can_repeat = True  # whether a rank may run a forward once more than the others

    def __init__(
        self,
        model: nn.Module,
        context: AbstractContextManager[Any] | None = None,
        stateful_loss: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_state = [] if stateful_loss is None else [stateful_loss]  # in a list: its buffers are its own
        if stateful_loss is not None and any(each.requires_grad for each in stateful_loss.parameters()):
            self.add_module(CRITERION, stateful_loss)  # its gradients are reduced with those of the model
        self.context = context
        self.call: CallRule | None = None
        self.metrics: Mapping[str, Any] | None = None  # of the last forward, if the model returns any
        self.weighs = False  # whether means are averaged: a step has several micro-batches
        self.has_weights = False  # whether the last loss in an evaluation came with a weight
        self.proportions = Proportions()
        self.records_sums = True  # whether `recorded` records sums and means as well
        self.unsaved: list[str] = []  # attributes that a forward keeps for the next one, and no checkpoint has
        self.divides: bool | None = None  # whether means show what they were divided by; None: not known yet

    def forward(self, batch: Any, function: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """Return the loss and its weight, or `function(model, batch)` if given: every call of the model must go
        through this method, where the wrappers' hooks run."""
        if function is not None:
            with self.context or nullcontext():
                return function(self.model, batch)
        assert self.call is not None
        if self.context is None:
            result = self.call.loss(self.model, batch)
        else:
            with self.context:
                result = self.call.loss(self.model, batch)
        if type(result) is Tensor and result.dtype is torch.float32 and not result.dim():
            return result, self.divisor(result) if self.weighs else None  # the common case, without another call
        value, weight, metrics = read_loss(result, self.call)
        if metrics is not self.metrics:  # nn.Module assigns slowly
            self.metrics = metrics
        if weight is None and self.weighs:
            return value, self.divisor(value)
        return value, weight

    def recorded(self, work: Callable[[], Any]) -> Any:
        """Compute a loss without gradients in a `LossGraph`. What a loss does with a sum of its targets (class weights,
        `numpy()`) may not work with a tensor that has a graph: then it is computed again, without that of sums."""
        try:
            with LossGraph(self, sums=self.records_sums):
                return work()
        except Exception:
            if not (self.records_sums and self.can_repeat):
                raise
        with LossGraph(self, sums=False):
            result = work()
        self.records_sums = False  # not if this failed as well: then the cause was another one
        return result

    def divisor(self, mean: Tensor) -> Divisor | None:
        """What a mean was divided by; None: it is weighted by its samples."""
        means = means_of(mean)
        count = next((each.divisor for each in means if each.weighs), None)
        if self.divides is False:
            if count is not None and self.proportions.is_listening:
                self.proportions.say(
                    f"The mean of this batch was divided by {float(count):g}, that of the first one by what its graph "
                    "does not show: it is weighted by its samples."
                )
            return None
        if count is not None and len(means) > 1:
            self.proportions.add(means)
        if count is None and self.divides:
            raise _changed_kind("a mean that does not show its divisor", "means that show it (cross-entropy)")
        if self.divides is None:
            self.divides = count is not None
        return None if count is None else Divisor(count)


def parameters_of_loss(loss: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    return [] if loss is None else [(f"{CRITERION}.{name}", parameter) for name, parameter in loss.named_parameters()]


def changed_kind(*, sums: bool) -> TrainError:
    """The error for a loss that is a sum with a weight (or, a mean) while the earlier ones were not."""
    kinds = ["a mean", "paceline.Loss(sum, weight)"]
    return _changed_kind(kinds[sums], kinds[not sums])


def _changed_kind(this: str, others: str) -> TrainError:
    return TrainError("loss-changed-kind", f"The loss of this batch is {this}, but that of other batches was {others}.")


Group = torch_dist.ProcessGroup | None
_BUCKET_BYTES = 64 << 20


def read_own_loss(loss: Tensor | Loss, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | Divisor | None]:
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
    return TrainError("comm-hook", f"trainer.backward(loss, weight=…) was called, but {name} reduces the gradients.")


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
        if bucket and (
            bucket[0].dtype != gradient.dtype or sum(each.nbytes for each in [*bucket, gradient]) > _BUCKET_BYTES
        ):
            _average(bucket, group)
            bucket = []
        bucket.append(gradient)
    if bucket:
        _average(bucket, group)


def _average(bucket: list[Tensor], group: Group) -> None:
    flat: Any = _flatten_dense_tensors(bucket)
    torch_dist.all_reduce(flat, group=group)
    flat.div_(torch_dist.get_world_size(group))
    for gradient, reduced in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
        gradient.copy_(reduced)
