"""One optimizer step, first half: forward and backward of its micro-batches. (`optimizer_step.py` is the second.)

The gradient of a step is Σsum / Σweight over every rank and micro-batch. Where the weights are samples, every rank
knows Σweight by arithmetic, and each backward is seeded with its share of 1 / Σweight: nothing is left to do after
the reduction. Where weights depend on the data (tokens that are not padding), backwards are seeded with
1 / (nominal weight), the real Σweight travels beside the last backward, and the exact factor goes into the reduced
gradients. The nominal weight is a power of two near the real one, equal on every rank: so float16 gradients of a sum
are no larger than those of its mean, and the detour costs no bit of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# An optimizer's first step imports this, which takes a second: once here, rather than in every forked rank.
import torch._dynamo
import torch.distributed as torch_dist
from torch import Tensor, nn

from paceline.data.loader import MicroBatch
from paceline.parallel.compose import Wrapped
from paceline.precision.scaler import Scaler
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.train.model_call import CallRule, read_loss
from paceline.train.nonfinite import NonfiniteGuard


class LossModule(nn.Module):
    """What gets wrapped for data parallel: from a batch to (sum or mean, weight or None).

    The loss is computed inside, so that a loss which calls any method of the model is seen by the wrapper; and the
    user's model is a part of this module rather than the wrapped thing, so its parameter names stay free of prefixes.
    """

    def __init__(self, model: nn.Module, context: AbstractContextManager[Any] | None = None) -> None:
        super().__init__()
        self.model = model
        self.context = context
        self.call: CallRule | None = None
        self.metrics: Mapping[str, Any] | None = None  # of the last forward, where the model returns any

    def forward(self, batch: Any, instead: Callable[[nn.Module, Any], Any] | None = None) -> Any:
        """(Sum or mean, weight or None); or what the function `instead` makes of the model and the batch: whatever
        runs the model has to come through here, as wrappers prepare it at this door."""
        if instead is not None:
            with self.context or nullcontext():
                return instead(self.model, batch)
        assert self.call is not None
        if self.context is None:
            result = self.call.loss(self.model, batch)
        else:
            with self.context:
                result = self.call.loss(self.model, batch)
        if type(result) is Tensor and result.dtype is torch.float32 and not result.dim():
            return result, None  # the common case, without a further call
        value, weight, self.metrics = read_loss(result)
        return value, weight


class Stepper:
    """Takes the micro-batches of a step, and keeps what became of them until `finish`."""

    def __init__(
        self,
        module: LossModule,
        wrapped: Wrapped,
        *,
        mesh: Mesh,
        draw: NoiseContext,
        scaler: Scaler,
        watch: NonfiniteGuard | None,
    ) -> None:
        self._module, self._draw = module, draw
        self._ranks, self._world, self._reports_loss = mesh.data_ranks, mesh.degrees.world, mesh.reports_loss
        self._forward, self._no_sync = wrapped.forward, wrapped.no_sync
        self._scaler = scaler if scaler.is_enabled() else None
        self._watch = watch
        self._seeds: dict[tuple[float, torch.dtype], Tensor] = {}
        self.nominal: float | None = None  # None: the number of samples
        self.reset()

    def reset(self) -> None:
        """Forget the micro-batches of an unfinished step."""
        self.noted: list[tuple[Tensor, Any]] = []  # (mean, samples) or (sum, weight) of each micro-batch
        self.means = True  # which of the two
        self.metrics: list[tuple[Mapping[str, Any], Any]] = []
        self.by_data = False  # whether the step's weight has to be asked of the other ranks
        self._total: Tensor | None = None
        self._pending: torch_dist.Work | None = None

    def add(self, micro: MicroBatch) -> Tensor:
        """Forward and backward of one micro-batch, whose loss comes back; the last one reduces the gradients."""
        draw = self._draw
        draw.samples, draw.draws = micro, 0
        if micro.last or self._no_sync is None:
            noted = self.backward(micro, *self._forward(micro.batch))
        else:
            with self._no_sync():
                noted = self.backward(micro, *self._forward(micro.batch))
        draw.samples = None
        return noted

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor | float | None]:
        self._draw.samples, self._draw.draws = micro, 0
        result: tuple[Tensor, Tensor | float | None] = self._forward(micro.batch)
        return result

    def backward(self, micro: MicroBatch, value: Tensor, weight: Tensor | float | None) -> Tensor:
        """Note the micro-batch's loss and run its backward, seeded with its share of the step."""
        noted = value.detach()
        if weight is None:
            self.by_data |= not micro.exact
            self.noted.append((noted, micro.samples))
            factor = self._ranks * micro.samples / micro.step_samples  # the reduction divides by the data ranks
        else:
            self.by_data, self.means = True, False
            if micro.samples == 0:  # a stand-in only keeps this rank in step with the others
                weight = 0.0
            factor = self._ranks / (self.nominal or micro.step_samples) if micro.samples else 0.0
            noted = _where_it_counts(noted, weight)
            self.noted.append((noted, weight))
        if self._module.metrics is not None:
            self.metrics.append((self._module.metrics, weight if weight is not None else micro.samples))
        if self.by_data and micro.last:
            self._send_weight(micro, value.device)
        if self._watch is not None:
            self._watch.look_at_loss(noted, micro.step)
        if factor == 1.0 and self._scaler is None:
            value.backward()
        else:
            value.backward(self._seed(factor, value))
        return noted

    def _seed(self, factor: float, value: Tensor) -> Tensor:
        """What the backward starts with: a constant that is kept, times fp16's scale of the moment."""
        seed = self._seeds.get((factor, value.dtype))
        if seed is None:
            seed = self._seeds[factor, value.dtype] = torch.full_like(value.detach(), factor)
        return seed if self._scaler is None else self._scaler.scale(seed)

    def _send_weight(self, micro: MicroBatch, device: torch.device) -> None:
        """Start adding up the weights of all ranks; the answer is needed only after the backward."""
        weight = self.noted[0][1] if len(self.noted) == 1 else sum([weight for _, weight in self.noted])
        if isinstance(weight, Tensor):
            self._total = weight.detach().to(torch.float64, copy=True)
        else:
            self._total = torch.tensor(weight, dtype=torch.float64, device=device)
        self._nominal = float(micro.step_samples if self.means else self.nominal or micro.step_samples)
        if not self._reports_loss:  # another rank has the same samples, and says so
            self._total.zero_()
        if self._world > 1:
            self._pending = torch_dist.all_reduce(self._total, async_op=True)

    def settle(self, micro: MicroBatch) -> None:
        """Where the caller decided only now that `micro` was the step's last: add up the weights."""
        if self.by_data and self._total is None:
            self._send_weight(micro, self.noted[0][0].device)

    def factor(self) -> Tensor | float:
        """What the reduced gradients still have to be multiplied by, where the weights depend on the data.

        A step in which nothing counted (all padding) has no gradient.
        """
        total = self._total
        assert total is not None
        if self._pending is not None:
            self._pending.wait()
        if total.device.type == "cpu":  # the number is there, and plain arithmetic is cheaper than four operations
            number = total.item()
            return self._nominal / number if number > 0 else 0.0
        return torch.where(total > 0, self._nominal / total, 0.0)


def _where_it_counts(loss: Tensor, weight: Tensor | float) -> Tensor:
    """A mean over nothing is 0/0; at weight zero it is not a loss but nothing."""
    if isinstance(weight, Tensor):
        if weight.device.type != "cpu":
            return torch.where(weight > 0, loss, 0.0)
        weight = weight.item()
    return loss if weight > 0 else torch.zeros_like(loss)
