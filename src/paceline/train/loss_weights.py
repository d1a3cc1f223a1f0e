"""How the losses of micro-batches add up to the loss of a step, whatever ranks and micro-batches they are spread over.

The gradient of a step is Σsum / Σweight over all ranks and micro-batches. If weights are sample counts, every rank can
compute Σweight, and each backward is seeded with its share of 1 / Σweight. If weights depend on the data (tokens
without padding), backwards are seeded with 1 / (nominal weight), Σweight is reduced during the last backward, and the
reduced gradients are multiplied by the exact factor. The nominal weight is a power of two near the real one, equal on
every rank: float16 gradients of a sum stay as small as those of its mean, without additional rounding.

The nominal weight of means is the number of samples, times a power of two for tokens: where all targets count, seeds
are the same as for means over samples, and the factor is one. On one rank it is the weight of the first micro-batch: a
step of a single one equals that of a plain loop bit for bit.

With local steps (`sync: {every: …}`) gradients are reduced within a replica. That of a replica is (number of replicas)
× Σsum / Σweight, with its own sums and the weight of all replicas: the mean over replicas is the gradient of the
whole batch. Data-dependent weights of others are not known: their samples are taken to weigh as much as its own. That
is exact if all samples weigh the same; otherwise replicas count in proportion to their samples, not to their tokens.

`run_backward` does without the Python code of `Tensor.backward`, which looks for overrides, converts its arguments,
compares their shapes, and fills a gradient of one if it is not given: 17 of the 77 µs that the backward of a two-layer
MLP takes on a CPU. All of this is known for a loss of the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from paceline.data.loader import MicroBatch
from paceline.errors import TrainError
from paceline.log import rank_log
from paceline.models.divisor import Divisor
from paceline.models.loss_module import LossModule, changed_kind
from paceline.parallel.dynamic_ddp import DynamicDDP, Forward, WeightInBucket
from paceline.parallel.sync.local_steps import LocalSteps
from paceline.plan.network_model import Traffic
from paceline.precision.policies import Scaler
from paceline.runtime.mesh import Mesh
from paceline.train.hooks import HookTable

_OFF = 1e-6  # above the rounding of weights
_torch_backward = Tensor.backward

Weight = Tensor | float | Divisor | None  # of a loss: a sum's, a mean's divisor, or None for a mean over samples


def run_backward(value: Tensor, seed: Tensor, *more: tuple[Tensor, Tensor]) -> None:
    """`value.backward(seed)`, together with `more` of such pairs. Overrides are still called: those of a subclass,
    of a function mode, or a patch."""
    is_plain = type(value) is Tensor and not value.dim() and Tensor.backward is _torch_backward
    if is_plain and not torch._C._is_torch_function_mode_enabled():
        roots, seeds = zip((value, seed), *more, strict=True)
        _engine_run_backward(roots, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        for root, gradient in ((value, seed), *more):
            root.backward(gradient)


class LossWeights:
    """Seeds backwards, keeps the losses of a step, and knows the factor of its reduced gradients.

    Of a kind of step, `finds_total` says that it reduces the weights of a step by itself, and `total` is their sum; its
    nominal weight is the number of samples, which every layout knows. `splits` says that it passes parts of
    micro-batches.
    """

    def __init__(
        self,
        module: LossModule,
        mesh: Mesh,
        hooks: HookTable,
        forward: Forward,
        *,
        scaler: Scaler,
        local_steps: LocalSteps | None,
        traffic: Traffic | None,
        finds_total: bool = False,
        splits: bool = False,
    ) -> None:
        self._module, self._mesh, self._hooks = module, mesh, hooks
        self._replicas, self._traffic = forward if isinstance(forward, DynamicDDP) else None, traffic
        self._ranks, self._world, self._reports_loss = mesh.data_ranks, mesh.degrees.world, mesh.reports_loss
        self._local_steps, self._finds_total = local_steps, finds_total
        self._scaler = scaler if scaler.is_enabled() else None
        self.is_shared = mesh.data_ranks > 1 or finds_total  # a step averages means of several forwards
        self._alone = not self.is_shared and not splits
        self.constant_factor: float | None = None  # of the reduced gradients of plain means; None: one
        if finds_total:
            self._ranks = 1
        elif self._scaler is not None and not splits and local_steps is None and mesh.data_ranks > 1:
            # Gradients of activations are those of one process, so the same scale does not overflow on more ranks only.
            self._ranks, self.constant_factor = 1, float(mesh.data_ranks)
        self._seeds: dict[tuple[float, torch.dtype, torch.Size], Tensor] = {}
        self._nominal: float | None = None  # weight of a step of sums; None: the number of samples
        self._per_sample = 1.0  # a power of two near the weight of a sample, for means
        self._measure: Callable[[float], float] | None = None
        self._of_step: Tensor | float = 0.0  # the nominal weight of this step
        self._warned = False
        self._from_global = False  # whether backwards start from the gradient of the mean over all ranks
        self._sums: bool | None = None  # whether losses are sums with weights; None: not known yet
        self.reset()

    def reset(self) -> None:
        """Discard the micro-batches of an unfinished step."""
        self.losses: list[tuple[Tensor, Any]] = []  # (mean, samples) or (sum, weight) of each micro-batch
        self.means = True  # whether `losses` are means
        self.metrics: list[tuple[Mapping[str, Any], Any]] = []
        self.data_weighted = False  # whether the weight of the step must be reduced over ranks
        self.total: Tensor | None = None
        self._mean_weight: Tensor | float | None = None  # the nominal weight of means in this step
        self._samples = 0  # of this rank
        self._pending: torch_dist.Work | None = None
        self._carried: WeightInBucket | None = None  # what reduces the weight of this step

    def expect(self, nominal: float, per_sample: float) -> None:
        """Take nominal weights near those of the first batch: of a step of sums, and of a sample."""
        if not self._finds_total:
            self._nominal, self._per_sample = nominal, per_sample

    def measure_first(self, nominal_of: Callable[[float], float]) -> None:
        """Take the nominal weight of sums from the weight of the first micro-batch."""
        self._measure = None if self._finds_total else nominal_of

    def start_from_global_mean(self, weight_per_sample: float) -> None:
        """From now on, backwards start from the gradient of the step's mean over all ranks and micro-batches, as in one
        process. Gradients are multiplied by the number of ranks after they are averaged."""
        self._from_global, self._ranks, self._per_sample = True, 1, weight_per_sample

    def backward(self, micro: MicroBatch, value: Tensor, weight: Weight) -> Tensor:
        """Keep the loss of the micro-batch and run its backward, seeded with its share of the step."""
        for hook in self._hooks.before_backward:
            hook(micro, value)
        if self._local_steps is not None:
            self.count(micro)
        is_mean = weight is None or type(weight) is Divisor
        if is_mean is self._sums or self._sums is None:
            self.note_kind(sums=not is_mean)
        if weight is None:
            self.data_weighted |= not micro.exact or self._from_global
        else:
            self.data_weighted, self.means = True, False
        loss, kept, seed = self.share(micro, micro.samples, value, weight)
        self.losses.append((loss, kept))
        if self._module.metrics is not None:
            self.metrics.append((self._module.metrics, kept))
        if self._replicas is not None and self._replicas.sends_weight:
            run_backward(value, seed, self._carry_weight(micro, self._replicas))
        else:
            if self.data_weighted and micro.last and not self._finds_total:
                self.start_reduction(micro, value.device)
            run_backward(value, seed)
        for done in self._hooks.after_backward:
            done(micro)
        return loss

    def share(
        self, micro: MicroBatch, samples: int, value: Tensor, weight: Weight
    ) -> tuple[Tensor, Tensor | float, Tensor]:
        """Of a loss over so many samples of a micro-batch: the loss and the weight to keep, and the gradient that its
        backward starts from, which is its share of the step."""
        loss = value.detach()
        if weight is None:
            # The reduction averages over data ranks.
            factor: Tensor | float = self._ranks * samples / micro.step_samples
            weight, varies = samples, False
        else:
            is_mean = type(weight) is Divisor
            weight = weight.weight if isinstance(weight, Divisor) else weight
            if isinstance(weight, Tensor) and weight.device.type == "cpu":
                weight = weight.item()  # Python arithmetic is cheaper than tensor operations
            if micro.samples == 0:  # a placeholder batch keeps this rank in step with the others
                weight = 0.0
            if not is_mean and self._nominal is None and self._measure is not None:
                self._nominal = self._measure(float(weight))
            loss = zero_without_weight(loss, weight)
            if self._from_global:
                self._expect_total(micro, weight, value, is_mean=is_mean)
            if is_mean:
                factor, loss = self._share_of_mean(micro, weight, value.dtype), loss * weight
            else:
                factor = self._ranks / (self._nominal or micro.step_samples) if micro.samples else 0.0
            varies = is_mean and not isinstance(factor, Tensor) and factor not in (0.0, 1.0)
        if isinstance(factor, Tensor):
            seed: Tensor | None = factor
        elif varies:
            seed = torch.full_like(value.detach(), factor)
        else:
            seed = self._seeds.get(kind := (factor, value.dtype, value.shape))
            if seed is None or seed._version:  # a hook on the loss may have changed it in place
                seed = self._seeds[kind] = torch.full_like(value.detach(), factor)
        assert seed is not None
        return loss, weight, seed if self._scaler is None else self._scaler.scale(seed)

    def note_kind(self, *, sums: bool) -> None:
        """Raise if losses of another kind were seen: in this step, or on several ranks in any."""
        if self._sums not in (None, sums) and (self.losses or self._world > 1):
            raise changed_kind(sums=sums)
        self._sums = sums

    def count(self, micro: MicroBatch) -> None:
        """Count the samples of this rank, which local steps need."""
        self._samples = self._samples + micro.samples if micro.group else micro.samples

    def divide_means(self, micro: MicroBatch) -> None:
        """The means of this step are divided by weights, on whichever rank they are."""
        self._mean_weight = micro.step_samples * self._per_sample

    def take_total(self, total: Tensor, micro: MicroBatch) -> None:
        """The sum of the weights of all ranks, where the step finds it by itself."""
        self.total, self._of_step = total, float(micro.step_samples)

    def start_reduction(self, micro: MicroBatch, device: torch.device) -> None:
        """Start an asynchronous sum of the weights of all ranks; `factor` waits for it."""
        self._set_nominal(micro)
        if self._local_steps is not None and not self._local_steps.is_synchronous(micro.step):
            self._reduce_in_replica(micro, device)
        else:
            self._reduce_weight(device)

    def reduce(self, micro: MicroBatch) -> None:
        """Reduce the weights after `micro` if `backward` has not: the caller decided only now that it was the last."""
        if self.data_weighted and self.total is None and self._carried is None:
            self.start_reduction(micro, self.losses[0][0].device)

    def factor(self) -> Tensor | float:
        """The factor for the reduced gradients of a step that is `data_weighted`: of weights that depend on the data,
        or that seeds of no rank have. Zero for a step of weight zero (only padding)."""
        factor = self._correction()
        if not self._from_global:
            return factor if self.constant_factor is None else factor * self.constant_factor
        off = abs(float(factor) - 1.0) > _OFF and float(factor) > 0.0
        if off and not self._warned:
            self._warned = True
            rank_log(torch_dist.get_rank() if self._world > 1 else 0).warning(str(_other_total(float(factor))))
        return factor * self._mesh.data_ranks  # of which the reduction took the mean

    def _share_of_mean(self, micro: MicroBatch, weight: Tensor | float, dtype: torch.dtype) -> Tensor | float:
        """The weight of a mean, relative to the nominal one of the step."""
        if self._alone and self._mean_weight is None:
            if isinstance(weight, Tensor):
                self._mean_weight = torch.where(weight > 0, weight, 1.0)
            else:  # without a target that counts, a penalty has no weight either
                self._mean_weight, weight = (weight, weight) if weight > 0 else (1.0, 0.0)
        if not self._alone and not self._from_global:
            self._mean_weight = micro.step_samples * self._per_sample
        assert self._mean_weight is not None
        if isinstance(weight, Tensor):  # a count is an integer, whose quotient would be rounded to float32
            return weight.to(dtype) * self._ranks / self._mean_weight
        return weight * self._ranks / self._mean_weight

    def _expect_total(self, micro: MicroBatch, weight: Tensor | float, value: Tensor, *, is_mean: bool) -> None:
        """The weight of the step is known here if it has one micro-batch, or if all samples weigh the same."""
        total = torch.tensor([float(micro.step_samples * self._per_sample)], dtype=torch.float64, device=value.device)
        if micro.last and not micro.group:
            total.fill_(weight if self._reports_loss else 0.0)
            if self._world > 1:
                torch_dist.all_reduce(total)
        expected = total.item() or 1.0
        self._mean_weight, self._nominal = (expected, self._nominal) if is_mean else (None, expected)

    def _carry_weight(self, micro: MicroBatch, replicas: DynamicDDP) -> tuple[Tensor, Tensor]:
        """The parameter that is reduced with the gradients of this backward, and its gradient: the weight so far."""
        self._carried, replicas.sends_weight = replicas.carried, False
        assert self._carried is not None
        self._set_nominal(micro)
        digits = self._carried.gradient(float(self._local_weight()), float(self._of_step))
        return self._carried.slot, digits

    def _local_weight(self) -> Any:
        return self.losses[0][1] if len(self.losses) == 1 else sum([weight for _, weight in self.losses])

    def _set_nominal(self, micro: MicroBatch) -> None:
        self._of_step = float(micro.step_samples if self.means else self._nominal or micro.step_samples)
        if self._mean_weight is not None:
            self._of_step = self._mean_weight

    def _reduce_in_replica(self, micro: MicroBatch, device: torch.device) -> None:
        """Start the sums of the weights and the numbers of samples in this replica."""
        samples = self._samples if micro.exact else micro.step_samples / self._ranks
        self.total = torch.full((2,), samples, dtype=torch.float64, device=device)
        self.total[0], self._step_samples = self._local_weight(), micro.step_samples
        if not self._reports_loss:  # another rank counts the same samples
            self.total.zero_()
        if self._world > self._mesh.local_replicas:
            self._pending = torch_dist.all_reduce(self.total, group=self._mesh.step_group, async_op=True)

    def _reduce_weight(self, device: torch.device) -> None:
        weight = self._local_weight()
        if isinstance(weight, Tensor):
            self.total = weight.detach().to(torch.float64, copy=True)
        else:
            self.total = torch.full((), weight, dtype=torch.float64, device=device)  # copies nothing to a GPU
        if not self._reports_loss:  # another rank counts the same samples
            self.total.zero_()
        if self._world > 1:
            self._pending = torch_dist.all_reduce(self.total, async_op=True)
            if self._traffic is not None:
                self._traffic.all_reduce(self.total.nbytes, self._world)

    def _correction(self) -> Tensor | float:
        if self._carried is not None:
            number = self._carried.total()
            if number is not None:
                return float(self._of_step) / number if number > 0 else 0.0
            self._carried = None
            self._reduce_weight(self.losses[0][0].device)
        total = self.total
        assert total is not None
        if isinstance(self._mean_weight, Tensor) and len(self.losses) == 1:
            return 1.0  # the only mean of the step, without a look at the device
        if self._pending is not None:
            self._pending.wait()
        if total.dim():  # weight and samples of this replica
            total = total[0] * self._step_samples / total[1].clamp(min=1.0)
        if total.device.type == "cpu":  # Python arithmetic is cheaper than tensor operations
            number = total.item()
            return float(self._of_step) / number if number > 0 else 0.0
        return torch.where(total > 0, self._of_step / total, 0.0)


def _other_total(factor: float) -> TrainError:
    return TrainError(
        "scaled-activations",
        f"Hooks and autograd functions have seen gradients of activations that are {factor:.3g} times too small.",
        why="micro-batches of a step have other weights (padding, ignored targets) than those of the first step, and "
        "the weight of all of them is known only after their backwards",
        fix="set accumulate=1, or make what depends on the size of these gradients linear",
    )


def zero_without_weight(loss: Tensor, weight: Tensor | float) -> Tensor:
    """At weight zero a mean loss is 0/0: return zero."""
    if isinstance(weight, Tensor):
        if weight.device.type != "cpu":
            return torch.where(weight > 0, loss, 0.0)
        weight = weight.item()
    return loss if weight > 0 else torch.zeros_like(loss)
