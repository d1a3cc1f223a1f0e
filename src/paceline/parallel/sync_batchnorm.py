"""Batch norm over the samples of every rank, on CPU and GPU.

    convert_sync_batchnorm(model)      # in place; returns the names of the layers that it changed

Plain batch norm normalises with the samples that one rank happens to hold, so another number of ranks trains another
model. Here a layer's statistics are those of the whole micro-batch, over all ranks: each rank gives mean,
variance and count; all gather these and merge them alike, in the order of ranks. The backward gathers two sums a
channel in the same way. The gradients of weight and bias stay this rank's own: DDP adds them up.

Ranks may hold different numbers of rows. A rank with a stand-in only (`noise.local_samples() == 0`) counts
nothing, forward or backward; its rows are normalised with the others' statistics, its running statistics move with the
others', and no gradient flows through its rows.

torch's nn.SyncBatchNorm needs a GPU and lets stand-ins into the statistics. A layer in eval mode with running
statistics is torch's own and talks to nobody. Where batch statistics are used, every rank has to run the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import TrainError
from paceline.runtime import collectives, noise


def convert_sync_batchnorm(model: nn.Module, group: collectives.Group = None) -> list[str]:
    """Make the model's batch norms count the samples of all ranks of the group; the names of those that changed.

    A layer changes its class, not its identity: parameters, hooks, state_dict names and isinstance checks stay. A
    subclass with a forward of its own is left alone, because it may compute something else (`left_alone` names those).
    """
    changed = []
    for name, module in model.named_modules():
        synchronised = _SYNCHRONISED.get(type(module))
        if synchronised is None and _is_plain_subclass(module):
            kind = type(module)
            synchronised = _SYNCHRONISED[kind] = type(f"Sync{kind.__name__}", (_Synchronised, kind), {})
        if synchronised is not None:
            module.__class__ = synchronised
            if group is not None:
                module.process_group = group
            changed.append(name)
    return changed


def left_alone(model: nn.Module) -> list[str]:
    """Batch norms that still count this rank's samples only."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [
        name for name, module in model.named_modules()
        if isinstance(module, kinds) and not isinstance(module, _Synchronised)
    ]  # fmt: skip


def _is_plain_subclass(module: nn.Module) -> bool:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return isinstance(module, kinds) and type(module).forward is _BatchNorm.forward and not _is_ours(module)


def _is_ours(module: nn.Module) -> bool:
    return isinstance(module, _Synchronised)


class _Synchronised(_BatchNorm):
    """Stands before one of torch's batch norms and replaces the part that looks at the batch."""

    def forward(self, input: Tensor) -> Tensor:
        group = getattr(self, "process_group", None)
        own = noise.local_samples()
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not by_batch or (_size(group) == 1 and own != 0):
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        rows = _dense(input)
        counts = own != 0 and rows.numel() > 0
        statistics = _statistics(rows.detach(), counts, self.eps, group)
        if self.training and self.track_running_stats and statistics.count is not None:
            self._track(statistics.mean, statistics.var, statistics.count)
        output: Tensor = _Normalise.apply(rows, self.weight, self.bias, statistics, counts, group)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: Tensor) -> None:
        """Move the running statistics as torch does: with the unbiased variance, here of the global count."""
        factor = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the average of all batches so far
                factor = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, var * (count / (count - 1)))):
            if running is not None:
                running.lerp_(new.to(running.dtype), factor)


class SyncBatchNorm1d(_Synchronised, nn.BatchNorm1d):
    """nn.BatchNorm1d over all ranks."""


class SyncBatchNorm2d(_Synchronised, nn.BatchNorm2d):
    """nn.BatchNorm2d over all ranks."""


class SyncBatchNorm3d(_Synchronised, nn.BatchNorm3d):
    """nn.BatchNorm3d over all ranks."""


class SyncBatchNorm(_Synchronised):
    """In place of torch's nn.SyncBatchNorm, and no subclass of it: DDP refuses those on CPU."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_SYNCHRONISED: dict[type[nn.Module], type[_Synchronised]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}


@dataclass(frozen=True)
class _Statistics:
    """What each channel is normalised with. The count is that of all ranks; None where there were only stand-ins."""

    mean: Tensor
    var: Tensor
    eps: float
    count: Tensor | None

    @property
    def invstd(self) -> Tensor:
        return (self.var + self.eps).rsqrt()


@torch.no_grad()
def _statistics(rows: Tensor, counts: bool, eps: float, group: collectives.Group) -> _Statistics:
    """Over all ranks, merged in float64: how the rows were split must not show in fp32."""
    channels = rows.shape[1]
    values = rows.numel() // channels if counts else 0
    local = _local(rows) if counts else torch.zeros(2 * channels, dtype=torch.float64, device=rows.device)
    mine = torch.cat([local, local.new_full((1,), values)])
    means, variances, numbers = _gather(mine, group).split([channels, channels, 1], dim=1)
    count = numbers.sum()
    # Only a rank with one value or none can be part of so small a sum: others need not wait for their GPU's answer.
    if values <= 1 and count <= 1:
        return _too_few(rows, eps, int(count))
    shares = numbers / count
    mean = (shares * means).sum(0)
    var = (shares * (variances + (means - mean) ** 2)).sum(0)
    return _Statistics(mean, var, eps, count)


def _too_few(rows: Tensor, eps: float, count: int) -> _Statistics:
    """No rank has samples of its own: each normalises its stand-in by itself, and nothing is remembered of it."""
    if count == 1:
        raise TrainError(
            "one-value-per-channel",
            f"A batch norm got one value for each of its {rows.shape[1]} channels, over all ranks.",
            why="one value has no variance: the output would be the bias, whatever the input",
            fix="use a larger batch or fewer accumulation groups, or put the layer in eval mode",
        )
    mean, var = _local(rows).chunk(2)
    return _Statistics(mean, var, eps, None)


def _local(rows: Tensor) -> Tensor:
    """Mean and biased variance of each channel of this rank's rows, one after the other. On CPU this kernel takes a
    third of the time of torch.var_mean, but answers in the dtype of its input; on a GPU it answers in float32 at least.
    """
    rows = rows if rows.is_cuda else rows.to(_dtype(rows))
    return torch.cat(torch.batch_norm_update_stats(rows, None, None, 0.0)).double()


class _Normalise(torch.autograd.Function):
    """Apply statistics that came from all ranks; the backward knows that they did."""

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
            everyones = _gather(sums.double().flatten(), ctx.group).sum(0).view_as(sums)
            # The statistics do not depend on a stand-in's rows, and what becomes of those is nobody's concern.
            grad_rows = torch.zeros_like(rows)
            if ctx.counts:
                means = (everyones / count).to(mean.dtype)
                grad_rows = _grad_rows(grad, rows, _like(mean, weight), statistics, means)
        grad_weight = sums[1] if ctx.needs_input_grad[1] else None
        grad_bias = sums[0] if ctx.needs_input_grad[2] else None
        return grad_rows, grad_weight, grad_bias, None, None, None


def _sums(grad: Tensor, rows: Tensor, by: _Statistics) -> Tensor:
    """For each channel, the sum of `grad` and the sum of `grad` times the normalised rows."""
    if rows.is_cuda:
        if rows.is_contiguous():  # for these the kernel rounds its sums to the dtype of the rows: 3e-3 in bf16
            grad, rows = grad.to(by.mean.dtype), rows.to(by.mean.dtype)
        invstd = by.invstd
        of_grad, with_rows, _, _ = torch.batch_norm_backward_reduce(
            grad, rows, by.mean, invstd, None, True, False, False
        )
        return torch.stack([of_grad, with_rows * invstd])
    # The gradients of bias and weight in eval mode are these two sums.
    _, with_rows, of_grad = torch.ops.aten.native_batch_norm_backward(
        grad, rows, None, by.mean, by.var, None, None, False, by.eps, [False, True, True]
    )
    return torch.stack([of_grad, with_rows])


def _grad_rows(grad: Tensor, rows: Tensor, weight: Tensor | None, by: _Statistics, means: Tensor) -> Tensor:
    """weight / std * (grad - means[0] - normalised rows * means[1]), where `means` are of all ranks' sums."""
    invstd = by.invstd
    if rows.is_cuda:
        # The kernel divides sums by a count; these are means already.
        one = torch.ones(1, dtype=torch.int32, device=rows.device)
        return torch.batch_norm_backward_elemt(grad, rows, by.mean, invstd, weight, means[0], means[1] / invstd, one)
    scale = invstd if weight is None else weight * invstd
    bias, slope = -scale * means
    # The last two terms are a batch norm in eval mode: one pass over the rows instead of four.
    through_statistics = functional.batch_norm(rows, by.mean, by.var, slope, bias, eps=by.eps)
    per_channel = scale.view(-1, *[1] * (rows.dim() - 2))
    return torch.addcmul(through_statistics, grad, per_channel).to(rows.dtype)


def _gather(mine: Tensor, group: collectives.Group) -> Tensor:
    """Every rank's values, a row a rank. A sum over these is the same on each rank; an all-reduce's order of summation
    is the backend's."""
    everyones = mine.new_empty(_size(group), len(mine))
    collectives.all_gather(list(everyones), mine, group)
    return everyones


def _size(group: collectives.Group) -> int:
    return torch_dist.get_world_size(group) if torch_dist.is_initialized() else collectives.world()


def _dense(rows: Tensor) -> Tensor:
    """Contiguous, or channels-last as it came: the layouts that torch's kernels are made for."""
    channels_last = (torch.channels_last, torch.channels_last_3d)
    if any(rows.is_contiguous(memory_format=memory_format) for memory_format in channels_last):
        return rows
    return rows.contiguous()


def _dtype(rows: Tensor) -> torch.dtype:
    """What statistics are computed in: float32, or float64 for float64."""
    return torch.promote_types(rows.dtype, torch.float32)


def _like(mean: Tensor, parameter: Tensor | None) -> Tensor | None:
    """torch's kernels want weight and bias in the dtype of the statistics; half precision models have them smaller."""
    return None if parameter is None else parameter.to(mean.dtype)
