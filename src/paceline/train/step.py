"""One optimizer step: forward and backward of its micro-batches, then the update.

The gradient of a step is Σsum / Σweight over every rank and micro-batch. Where the weights are samples, every rank
knows Σweight by arithmetic, and each backward is seeded with its share of 1 / Σweight: nothing is left to do after
the reduction. Where weights depend on the data (tokens that are not padding), backwards are seeded as if they were
samples, the real Σweight travels beside the last backward, and the exact factor goes into the reduced gradients.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

# An optimizer's first step imports this, which takes a second: once here, rather than in every forked rank.
import torch._dynamo
from torch import Tensor, nn

from paceline.data.loader import Micro
from paceline.errors import TrainError
from paceline.runtime import collectives
from paceline.runtime.noise import drawing
from paceline.train.calling import Call, read_loss


class LossModule(nn.Module):
    """What gets wrapped for data parallel: from a batch to (sum or mean, weight or None).

    The loss is computed inside, so that a loss which calls any method of the model is seen by the wrapper; and the
    user's model is a part of this module rather than the wrapped thing, so its parameter names stay free of prefixes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.call: Call | None = None

    def forward(self, batch: Any) -> tuple[Tensor, Tensor | float | None]:
        assert self.call is not None
        return read_loss(self.call(batch))


@dataclass(frozen=True)
class Finished:
    """A step that was taken: this rank's part of the loss, still on the device, and the gradient norm if known."""

    loss_sum: Tensor
    weight: Tensor | float
    grad_norm: Tensor | None


class Stepper:
    """Takes micro-batches until a step is full, then updates the weights."""

    def __init__(
        self,
        module: LossModule,
        wrapped: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        ranks: int,
        seed: int,
        clip_norm: float | None,
    ) -> None:
        self._wrapped, self._optimizer = wrapped, optimizer
        self._ranks, self._seed, self._clip_norm = ranks, seed, clip_norm
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._everything = list(module.parameters())  # more than the optimizer holds, if it holds a part
        self._unchecked: nn.Module | None = (
            module.model
        )  # until the first step has shown which parameters get gradients
        self._start_over()

    def _start_over(self) -> None:
        self._sum: Tensor | None = None
        self._weight: Tensor | float = 0.0
        self._by_data = False
        self._pending: collectives.Work | None = None
        self._total: Tensor | None = None
        self._nominal = 1

    def add(self, micro: Micro) -> None:
        """Forward and backward of one micro-batch; gradients are reduced with the step's last one."""
        with self._reduction_only_at_end(micro):
            with drawing(
                self._seed,
                micro.step,
                micro.group,
                start=micro.start,
                own=micro.samples,
                rows=micro.group_samples,
            ):
                value, weight = self._wrapped(micro.batch)
            seed = self._note(micro, value, weight)
            if micro.last and self._by_data:
                self._send_weight(value.device)
            (value * seed).backward()

    def _reduction_only_at_end(self, micro: Micro) -> AbstractContextManager[Any]:
        no_sync = getattr(self._wrapped, "no_sync", None)
        return nullcontext() if micro.last or no_sync is None else no_sync()

    def _note(self, micro: Micro, value: Tensor, weight: Tensor | float | None) -> float:
        """Add the micro-batch to the step's sum and weight; the factor its backward starts with."""
        share = self._ranks / micro.step_samples  # DDP divides by the number of ranks; this undoes it
        self._nominal = micro.step_samples
        if micro.samples == 0:  # a stand-in: it only keeps this rank in step with the others
            self._by_data |= weight is not None
            self._add(value.detach() * 0.0, 0.0)
            return 0.0
        if weight is None:
            self._by_data |= not micro.exact
            self._add(value.detach() * micro.samples, float(micro.samples))
            return share * micro.samples
        self._by_data = True
        self._add(value.detach(), weight.detach() if isinstance(weight, Tensor) else weight)
        return share

    def _add(self, value: Tensor, weight: Tensor | float) -> None:
        self._sum = value if self._sum is None else self._sum + value
        self._weight = self._weight + weight

    def _send_weight(self, device: torch.device) -> None:
        """Start adding up the weights of all ranks; the answer is needed only after the backward."""
        self._total = torch.as_tensor(self._weight, dtype=torch.float64, device=device).clone()
        self._pending = collectives.all_reduce(self._total, async_op=True)

    def update(self) -> Finished:
        """The optimizer step for what was added."""
        assert self._sum is not None
        if self._unchecked is not None:
            self._require_gradients(self._unchecked)
        if self._by_data:
            self._scale_by_weight()
        norm = None
        if self._clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._optimizer.step()
        for parameter in self._everything:
            parameter.grad = None
        finished = Finished(self._sum, self._weight, norm)
        self._start_over()
        return finished

    def _require_gradients(self, model: nn.Module) -> None:
        """On several ranks a parameter that the loss does not use leaves its whole bucket unreduced: DDP would say so
        at the next step, without names, and this step's update would already be wrong."""
        without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if without and self._ranks > 1:
            raise TrainError(
                "unused-parameters",
                f"The loss does not depend on {', '.join(without[:8])}{' and others' if len(without) > 8 else ''}.",
                why="on several ranks the reduction is complete only when every trainable parameter got a gradient",
                fix="use them in forward, or freeze them with requires_grad_(False)",
            )
        self._unchecked = None

    def _scale_by_weight(self) -> None:
        assert self._total is not None and self._pending is not None
        self._pending.wait()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # A step in which nothing counted (all padding) has no gradient.
        factor = torch.where(self._total > 0, self._nominal / self._total, 0.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
