"""Batch norm with statistics over all ranks, on CPU and GPU.

    convert_sync_batchnorm(model)      # in place; returns the names of the converted layers

Plain batch norm uses the samples of one rank, so the number of ranks changes the model. Here, each rank computes mean,
variance and count of its samples; these are all-gathered and merged in rank order, so all ranks get the same result.
The backward gathers two sums per channel in the same way. Gradients of weight and bias stay local: DDP reduces them.

Ranks may hold different numbers of samples. The placeholder of a rank without samples (`noise.local_samples() == 0`) is
excluded from the statistics; it is normalized with those of the other ranks and receives a zero gradient.

torch's nn.SyncBatchNorm needs a GPU and would include placeholders. In eval mode with running statistics, the layer is
plain batch norm. In training mode, it is collective: it must be run on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from paceline.errors import TrainError
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.plan.network_model import Traffic
from paceline.runtime import collectives, noise
from paceline.text import plural

_BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def apply_sync_batchnorm(parts: ModelParts, context: PassContext) -> str | None:
    changed = convert_sync_batchnorm(parts.model, context.mesh.data_group, context.traffic)
    changed += synchronize_instance_norms(parts.model, context.mesh.data_group)
    others = unconverted(parts.model)
    if others:
        context.log.warning(
            f"sync_batchnorm: {', '.join(others[:4])} not converted: custom forward; statistics stay per rank"
        )
    if not changed:
        return None
    ranks = "the ranks of a replica" if context.mesh.local_replicas > 1 else "all ranks"
    return f"sync_batchnorm: {plural(len(changed), 'layer')}, statistics over {ranks}"


def convert_sync_batchnorm(
    model: nn.Module, group: collectives.Group = None, traffic: Traffic | None = None
) -> list[str]:
    """Synchronize the batch norms of the model over the group. Returns the names of the converted layers.

    Only the class of a layer changes: parameters, hooks, state_dict names and isinstance checks stay. Subclasses with a
    custom forward are not converted, as they may compute something else (see `unconverted`).
    """
    changed = []
    for name, module in model.named_modules():
        kind = type(module)
        synchronized = _SYNCHRONIZED.get(kind)
        if synchronized is None and isinstance(module, _BATCHNORMS) and kind.forward is _BatchNorm.forward:
            synchronized = _SYNCHRONIZED[kind] = type(f"Sync{kind.__name__}", (SynchronizedNorm, kind), {})
        if synchronized is not None:
            module.__class__ = synchronized
            if group is not None:
                module.process_group = group
            if traffic is not None:
                module.traffic = traffic
            changed.append(name)
    return changed


def synchronize_instance_norms(model: nn.Module, group: collectives.Group = None) -> list[str]:
    """Average the running statistics of instance norms, which are means over the samples, over the group."""
    found = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, _InstanceNorm) and module.track_running_stats
    ]  # fmt: skip
    for _, module in found:
        module.register_forward_hook(partial(_average_statistics, group))
    return [name for name, _ in found]


@torch.no_grad()
def _average_statistics(group: collectives.Group, module: _InstanceNorm, args: Any, output: Any) -> None:
    if module.training and module.running_mean is not None and module.running_var is not None:
        statistics, samples = torch.cat([module.running_mean, module.running_var]).double(), noise.local_samples()
        share = statistics.new_tensor([1.0 if samples is None else samples])
        gathered = _gather(torch.cat([statistics * share, share]), group).sum(0)
        if gathered[-1] > 0:
            mean, var = (gathered[:-1] / gathered[-1]).chunk(2)
            module.running_mean.copy_(mean)
            module.running_var.copy_(var)


def unconverted(model: nn.Module) -> list[str]:
    """Names of batch norms that use the samples of this rank only."""
    return [
        name for name, module in model.named_modules()
        if isinstance(module, _BATCHNORMS) and not isinstance(module, SynchronizedNorm)
    ]  # fmt: skip


class SynchronizedNorm(_BatchNorm):
    """Mixin for torch's batch norms that replaces the computation of batch statistics."""

    traffic: Traffic | None = None  # counts the bytes that this rank sends

    def forward(self, input: Tensor) -> Tensor:
        group = getattr(self, "process_group", None)
        samples = noise.local_samples()
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not uses_batch or (_size(group) == 1 and samples != 0):
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        rows = _dense(input)
        counts = samples != 0 and rows.numel() > 0
        statistics = _statistics(rows.detach(), counts, self.eps, group)
        if self.traffic is not None:
            self._count(self.traffic, rows, _size(group))
        if self.training and self.track_running_stats and statistics.count is not None:
            self._track(statistics.mean, statistics.var, statistics.count)
        output: Tensor = _Normalize.apply(rows, self.weight, self.bias, statistics, counts, group)
        return output

    @staticmethod
    def _count(traffic: Traffic, rows: Tensor, ranks: int) -> None:
        """Two numbers per channel and a count in the forward, two per channel in the backward, in float64."""
        channels = rows.shape[1]
        traffic.all_gather(8 * (2 * channels + 1), ranks)
        if rows.requires_grad and torch.is_grad_enabled():
            traffic.all_gather(8 * 2 * channels, ranks)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Update the running statistics as torch does, with the unbiased variance of the global count."""
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # cumulative moving average
                factor = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            if running is not None:
                running.lerp_(new.to(running.dtype), factor)


class SyncBatchNorm1d(SynchronizedNorm, nn.BatchNorm1d):
    """nn.BatchNorm1d over all ranks."""


class SyncBatchNorm2d(SynchronizedNorm, nn.BatchNorm2d):
    """nn.BatchNorm2d over all ranks."""


class SyncBatchNorm3d(SynchronizedNorm, nn.BatchNorm3d):
    """nn.BatchNorm3d over all ranks."""


class SyncBatchNorm(SynchronizedNorm):
    """Replaces nn.SyncBatchNorm. Not a subclass of it, because DDP rejects those on CPU."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_SYNCHRONIZED: dict[type[nn.Module], type[SynchronizedNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}


@dataclass(frozen=True)
class _Statistics:
    """Statistics per channel over all ranks. `count` is None if no rank has samples."""

    mean: Tensor
    var: Tensor
    eps: float
    count: Tensor | None

    @property
    def invstd(self) -> Tensor:
        return (self.var + self.eps).rsqrt()


@torch.no_grad()
def _statistics(rows: Tensor, counts: bool, eps: float, group: collectives.Group) -> _Statistics:
    """Statistics over all ranks, merged in float64 so that the fp32 result is independent of the slicing."""
    channels = rows.shape[1]
    values = rows.numel() // channels if counts else 0
    local = _local(rows) if counts else torch.zeros(2 * channels, dtype=torch.float64, device=rows.device)
    local = torch.cat([local, local.new_full((1,), values)])
    means, variances, numbers = _gather(local, group).split([channels, channels, 1], dim=1)
    count = numbers.sum((0, 1))  # a `LossGraph` takes `sum()` for that of a loss
    # Reading `count` synchronizes with the GPU; only a rank with at most one value needs to.
    if values <= 1 and count <= 1:
        return _placeholder_statistics(rows, eps, int(count))
    shares = numbers / count
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean) ** 2)).sum(0)
    return _Statistics(mean, var, eps, count)


def _placeholder_statistics(rows: Tensor, eps: float, count: int) -> _Statistics:
    """Without samples on any rank, each rank normalizes its placeholder locally and tracks nothing."""
    if count == 1:
        raise TrainError(
            "one-value-per-channel",
            f"Batch norm received one value for each of its {rows.shape[1]} channels, over all ranks.",
        )
    mean, var = _local(rows).chunk(2)
    return _Statistics(mean, var, eps, None)


def _local(rows: Tensor) -> Tensor:
    """Concatenated mean and biased variance of each channel, of this rank. On CPU, this kernel is 3x faster than
    torch.var_mean but returns the dtype of its input; on a GPU, it returns at least float32."""
    rows = rows if rows.is_cuda else rows.to(_dtype(rows))
    return torch.cat(torch.batch_norm_update_stats(rows, None, None, 0.0)).double()


class _Normalize(torch.autograd.Function):
    """Normalizes with global statistics, and differentiates through them in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: _Statistics,
        counts: bool,
        group: collectives.Group,
    ) -> Tensor:
        mean, var, eps = statistics.mean.to(_dtype(rows)), statistics.var.to(_dtype(rows)), statistics.eps
        ctx.save_for_backward(rows, weight, mean, var, statistics.count)
        ctx.eps, ctx.counts, ctx.group = eps, counts, group
        return functional.batch_norm(rows, mean, var, _like(mean, weight), _like(mean, bias), eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, mean, var, count = ctx.saved_tensors
        statistics = _Statistics(mean, var, ctx.eps, count)
        grad = grad if grad.stride() == rows.stride() else torch.empty_like(rows).copy_(grad)
        sums = _sums(grad, rows, statistics) if ctx.counts else mean.new_zeros(2, len(mean))
        grad_rows = None
        if ctx.needs_input_grad[0]:
            totals = _gather(sums.double().flatten(), ctx.group).sum(0).view_as(sums)
            # The statistics do not depend on a placeholder, and its loss has weight zero.
            grad_rows = torch.zeros_like(rows)
            if ctx.counts:
                means = (totals / count).to(mean.dtype)
                grad_rows = _grad_rows(grad, rows, _like(mean, weight), statistics, means)
        grad_weight = sums[1] if ctx.needs_input_grad[1] else None
        grad_bias = sums[0] if ctx.needs_input_grad[2] else None
        return grad_rows, grad_weight, grad_bias, None, None, None


def _sums(grad: Tensor, rows: Tensor, by: _Statistics) -> Tensor:
    """For each channel, the sum of `grad` and the sum of `grad` times the normalized rows."""
    if rows.is_cuda:
        if rows.is_contiguous():  # here the kernel rounds sums to the dtype of the rows: 3e-3 error in bf16
            grad, rows = grad.to(by.mean.dtype), rows.to(by.mean.dtype)
        invstd = by.invstd
        grad_sum, with_rows, _, _ = torch.batch_norm_backward_reduce(
            grad, rows, by.mean, invstd, None, True, False, False
        )
        return torch.stack([grad_sum, with_rows * invstd])
    # In eval mode, these sums are the gradients of bias and weight.
    _, with_rows, grad_sum = torch.ops.aten.native_batch_norm_backward(
        grad, rows, None, by.mean, by.var, None, None, False, by.eps, [False, True, True]
    )
    return torch.stack([grad_sum, with_rows])


def _grad_rows(grad: Tensor, rows: Tensor, weight: Tensor | None, by: _Statistics, means: Tensor) -> Tensor:
    """weight / std * (grad - means[0] - normalized rows * means[1]); `means` are over all ranks."""
    invstd = by.invstd
    if rows.is_cuda:
        # The kernel divides by the count, but these are already means.
        one = torch.ones(1, dtype=torch.int32, device=rows.device)
        return torch.batch_norm_backward_elemt(grad, rows, by.mean, invstd, weight, means[0], means[1] / invstd, one)
    scale = invstd if weight is None else weight * invstd
    bias, slope = -scale * means
    # The last two terms are batch norm in eval mode: one pass over the rows instead of four.
    through_statistics = functional.batch_norm(rows, by.mean, by.var, slope, bias, eps=by.eps)
    per_channel = scale.view(-1, *[1] * (rows.dim() - 2))
    return torch.addcmul(through_statistics, grad, per_channel).to(rows.dtype)


def _gather(local: Tensor, group: collectives.Group) -> Tensor:
    """One row per rank. Unlike with an all-reduce, the order of summation does not depend on the backend."""
    gathered = local.new_empty(_size(group), len(local))
    collectives.all_gather(list(gathered), local, group)
    return gathered


def _size(group: collectives.Group) -> int:
    return torch_dist.get_world_size(group) if torch_dist.is_initialized() else collectives.world()


def _dense(rows: Tensor) -> Tensor:
    """Contiguous or channels-last, the memory formats that torch's kernels support."""
    channels_last = (torch.channels_last, torch.channels_last_3d)
    is_dense = any(rows.is_contiguous(memory_format=memory_format) for memory_format in channels_last)
    return rows if is_dense else rows.contiguous()


def _dtype(rows: Tensor) -> torch.dtype:
    """Statistics are computed in float32, or in float64 for float64 inputs."""
    return torch.promote_types(rows.dtype, torch.float32)


def _like(mean: Tensor, parameter: Tensor | None) -> Tensor | None:
    """The kernels expect weight and bias in the dtype of the statistics, which differs in half precision."""
    return None if parameter is None else parameter.to(mean.dtype)
