"""The parameter update, from the reduced gradients of a step.

In this order: the mean over replicas in the warm-up of local steps, the factor of data-dependent weights, fp16
unscaling, hooks and callbacks on gradients, clipping, the learning rate of the step, the optimizer, a round of local
steps, the moving average. Nothing synchronizes with the GPU, except `nonfinite: skip` without a fused optimizer.

Norms of sharded gradients are over all ranks, or with local steps over those of a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from paceline.optim.clip import clip, total_norm
from paceline.optim.ema import Ema
from paceline.optim.fused import FusedStep
from paceline.parallel.optimizer_binding import raise_on_mixed_tensors
from paceline.parallel.shards import local_shard
from paceline.parallel.sync.local_steps import LocalSteps
from paceline.precision.policies import Scaler
from paceline.train.checks.foreign_steps import RequireOwner
from paceline.train.checks.gradient_hooks import GradientHooks
from paceline.train.checks.nonfinite import NonfiniteGuard, is_fused
from paceline.train.checks.unsupported import asks_for_closure, needs_closure
from paceline.train.held_params import HeldParams


class OptimizerUpdate:
    """Updates the parameters. `skipped` is 1.0 if the last step was skipped, on the device or as a float."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        *,
        scaler: Scaler,
        average: Ema | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        nonfinite: str = "raise",
        watch: NonfiniteGuard | None = None,
        sharded: HeldParams | None = None,
    ) -> None:
        self.optimizer, self.average, self._sharded = optimizer, average, sharded
        self.local_steps: LocalSteps | None = None
        self.learning_rate: Callable[[int], float] | None = None  # a factor for each step; None: constant
        self.scheduler: Any = None  # the user's, if it steps with the optimizer
        self._fused = FusedStep(optimizer, RequireOwner) if FusedStep.supports(optimizer) else None
        self.refresh_parameters()
        self._all_parameters = list(module.parameters())  # may be more than the optimizer holds
        self._scaler = scaler if scaler.is_enabled() else None
        self._clip_norm, self._clip_value = clip_norm, clip_value
        self._skip = nonfinite == "skip" and self._scaler is None  # the scaler skips steps itself
        self._checks_norm = nonfinite != "raise" and self._scaler is None
        self._needs_gradients = clip_norm is not None or clip_value is not None or self._checks_norm
        # A forward with NaN changes the running statistics of batch norm even if the step is skipped.
        kept = [buffer for buffer in module.buffers() if buffer.is_floating_point()] if nonfinite != "raise" else []
        self._buffers = [(buffer, buffer.clone()) for buffer in kept]
        self._on_device = self._all_parameters[0].device.type != "cpu" and is_fused(optimizer)
        self._watch = watch
        self.lr = 0.0  # of the first group in the last step
        self.skipped: Tensor | float | None = None
        self.gradient_hooks: GradientHooks | None = None  # called once per step
        self.on_gradients: Callable[[], None] | None = None  # the user's, before clipping
        self.before_update: Callable[[], None] | None = None  # waits for a save that is still copying
        self.require_gradients: Callable[[], None] | None = None
        self.is_changing = False  # False: parameters, optimizer and averages belong to the same step

    @property
    def is_scaled(self) -> bool:
        """Whether gradients still have the loss scale of fp16."""
        if self._scaler is None:
            return False
        return self._scaler._per_optimizer_states[id(self.optimizer)]["stage"] is OptState.READY

    @property
    def waits(self) -> bool:
        """Whether a step reads a value on the host: to skip the update of an optimizer that is not fused."""
        return (self._checks_norm or self._scaler is not None) and not is_fused(self.optimizer)

    def refresh_parameters(self) -> None:
        """Call after a parameter group was added to the optimizer."""
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def forget_state(self) -> None:
        """Call before the state of the optimizer is replaced, so that its memory is free at once."""
        if self._fused is not None:
            self._fused.forget()

    def apply(self, step: int, factor: Tensor | float | None) -> Tensor | None:
        """Update the parameters in step `step`, counted from 0. Returns the gradient norm, if it was computed."""
        norm = None
        if self.require_gradients is not None:
            self.require_gradients()
        if isinstance(factor, float) and factor == 1.0:
            factor = None
        if self._sharded is not None:
            self._sharded.assign_gradients()
        if self.local_steps is not None:
            self.local_steps.before_step(step)
            if self.local_steps.is_synchronous(step):
                self._average_gradients(self.local_steps)
        hooked = self.on_gradients is not None or (self.gradient_hooks is not None and self.gradient_hooks.any)
        unscales = self._needs_gradients or hooked or (self._sharded is not None and self._scaler is not None)
        if factor is not None or unscales:
            norm = self._scale_and_clip(factor, unscales)
        if self.learning_rate is not None:
            self.set_rates(step)
        self.lr = self.optimizer.param_groups[0]["lr"]
        blocked = self._watch is not None and self._watch.tripped
        steps = not blocked and not (self._skip and norm is not None and self._skipped(norm))
        if steps or self.local_steps is not None:  # a replica that takes no step joins the round of the others
            if self.before_update is not None:
                self.before_update()
            self.is_changing = True
            if steps:
                self._take_step()
            if self.local_steps is not None:
                self.local_steps.after_step(step + 1)
            if steps and self.average is not None:
                self.average.update(step + 1)
            if self.scheduler is not None:  # also in a replica that takes no step: all have the same learning rate
                self.scheduler.step()
            self.is_changing = False
        for parameter in self._all_parameters:
            parameter.grad = None
        if self._buffers:
            self._restore_nonfinite_buffers()
        return norm

    def _average_gradients(self, local_steps: LocalSteps) -> None:
        """Over replicas. A parameter that only others have used gets a gradient too."""
        reached = local_steps.any_replica([parameter.grad is not None for parameter in self._parameters])
        for parameter, used in zip(self._parameters, reached, strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        local_steps.average_([local_shard(p.grad) for p in self._parameters if p.grad is not None])

    def set_rates(self, step: int) -> None:
        """Set the learning rates of the schedule, if there is one."""
        if self.learning_rate is not None:
            rate = self.learning_rate(step)
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate

    def discard_gradients(self) -> bool:
        """Discard gradients that code outside the Trainer left behind. Returns whether there were any."""
        found = False
        for parameter in self._all_parameters:
            if parameter.grad is not None:
                parameter.grad, found = None, True
        return found

    @torch.no_grad()
    def keep_buffers(self) -> None:
        """Take the current buffers, which were just loaded, as valid."""
        for buffer, before in self._buffers:
            before.copy_(buffer)

    @torch.no_grad()
    def _restore_nonfinite_buffers(self) -> None:
        for buffer, before in self._buffers:
            buffer.copy_(torch.where(torch.isfinite(buffer), buffer, before))
            before.copy_(buffer)

    def _take_step(self) -> None:
        try:
            if self._scaler is None:
                if self._fused is None:
                    self.optimizer.step()
                else:
                    self._fused.step()
                return
            self._scaler.step(self.optimizer)
        except Exception as error:
            raise_on_mixed_tensors(error, self.optimizer)
            if asks_for_closure(error):
                raise needs_closure(self.optimizer) from error
            raise
        self._scaler.update()
        self.skipped = self._scaler.overflowed

    def _scale_and_clip(self, factor: Tensor | float | None, unscales: bool) -> Tensor | None:
        held = [p for p in self._parameters if p.grad is not None]
        gradients = [p.grad for p in held] if self._sharded is None else [local_shard(p.grad) for p in held]
        norm_of = total_norm if self._sharded is None else self._sharded.norm_of(held)
        if isinstance(factor, float):
            if factor != 1.0 and gradients:  # a pipeline stage may have only frozen parameters
                torch._foreach_mul_(gradients, factor)
        elif factor is not None:
            for device, dtype in {(gradient.device, gradient.dtype) for gradient in gradients}:
                same = [gradient for gradient in gradients if (gradient.device, gradient.dtype) == (device, dtype)]
                torch._foreach_mul_(same, factor.to(device, dtype))
        if not unscales:
            return None
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        if self.gradient_hooks is not None:
            self.gradient_hooks.apply()
        if self.on_gradients is not None:
            self.on_gradients()
        # Before clipping by value, which would hide infinite gradients.
        norm = norm_of(gradients) if self._checks_norm or self._clip_norm is not None else None
        if norm is not None and self._watch is not None:
            self._watch.check_norm(norm)
        known = None if self._clip_value is not None else norm
        clipped = clip(gradients, self._clip_norm, self._clip_value, known, norm_of)
        return norm if self._clip_value is not None or clipped is None else clipped

    def _skipped(self, norm: Tensor) -> bool:
        """Whether to skip the step on the host; a fused optimizer on a GPU skips it itself."""
        if self._on_device:
            self.skipped = (~torch.isfinite(norm)).float()
            self.optimizer.found_inf = self.skipped  # type: ignore[attr-defined]
            return False
        skip = not isfinite(norm.item())
        self.skipped = float(skip)
        return skip
