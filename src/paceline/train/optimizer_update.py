"""The parameter update, from the reduced gradients of a step.

In this order: what features do to reduced gradients, the factor of data-dependent weights, what they do to finished
gradients, whether they veto the step, what they set before it, the optimizer, and what follows its parameters. Which
these are, and in which order, says `features/table.py`.

Norms of sharded gradients are over all ranks, or with local steps over those of a replica.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.optim.clip import StepGradients
from paceline.optim.fused import FusedStep
from paceline.parallel.optimizer_binding import raise_on_mixed_tensors
from paceline.parallel.shards import local_shard
from paceline.train.checks.foreign_steps import RequireOwner
from paceline.train.checks.unsupported import asks_for_closure, needs_closure
from paceline.train.held_params import BoundOptimizer
from paceline.train.hooks import HookTable


class OptimizerUpdate:
    """Updates the parameters. `stepped`: whether the last step was taken, as the host knows it; `skipped` is 1.0 if it
    was skipped, on the device or as a float."""

    def __init__(self, bound: BoundOptimizer, module: nn.Module, hooks: HookTable) -> None:
        self.optimizer, self._held, self._hooks = bound.optimizer, bound.held, hooks
        optimizer = bound.optimizer
        self._fused = FusedStep(optimizer, RequireOwner) if FusedStep.supports(optimizer) else None
        self.refresh_parameters()
        self._all_parameters = list(module.parameters())  # may be more than the optimizer holds
        self.lr = 0.0  # of the first group in the last step
        self.skipped: Tensor | float | None = None
        self.stepped = True
        self.is_changing = False  # False: parameters, optimizer and averages belong to the same step

    def refresh_parameters(self) -> None:
        """Call after a parameter group was added to the optimizer."""
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]

    def forget_state(self) -> None:
        """Call before the state of the optimizer is replaced, so that its memory is free at once."""
        if self._fused is not None:
            self._fused.forget()

    def prepare(self, step: int) -> None:
        """Before a captured `apply` of step `step`: what it does on the host."""
        for hook in self._hooks.before_update:
            hook(step)
        self.lr = self.optimizer.param_groups[0]["lr"]

    def apply(self, step: int, factor: Tensor | float | None, *, prepared: bool = False) -> Tensor | None:
        """Update the parameters in step `step`, counted from 0. Returns the gradient norm, if it was computed."""
        hooks, norm, skipped, stepped = self._hooks, None, None, True
        if self._held is not None:
            self._held.assign_gradients()
        for reduced in hooks.on_reduced:
            reduced(step)
        if isinstance(factor, float) and factor == 1.0:
            factor = None
        if factor is not None or hooks.on_gradients:
            gradients = self._finish_gradients(step, factor)
            norm, skipped = gradients.known_norm, gradients.skipped
        for veto in hooks.vetoes:
            stepped = not veto() and stepped
        if not prepared:  # as `prepare` does, without a call
            for before in hooks.before_update:
                before(step)
            self.lr = self.optimizer.param_groups[0]["lr"]
        self.is_changing = True
        if stepped:
            overflowed = self._take_step()
            skipped = skipped if overflowed is None else overflowed
        for hook in hooks.after_update:
            hook(step + 1, stepped)
        if not prepared:  # as `finish` does
            for last in hooks.end_of_update:
                last(step + 1, stepped)
        self.is_changing, self.stepped, self.skipped = False, stepped, skipped
        for parameter in self._all_parameters:
            parameter.grad = None
        return norm

    def replay(self, captured: Callable[[], Tensor | float | None]) -> None:
        """Run a captured `apply`, which returns what it skipped, after `prepare`."""
        self.is_changing = True
        self.skipped = captured()
        self.is_changing, self.stepped = False, True

    def finish(self, step: int) -> None:
        """After a captured `apply` of step `step`: what comes last, on the host."""
        self.is_changing = True
        for hook in self._hooks.end_of_update:
            hook(step + 1, self.stepped)
        self.is_changing = False

    def discard_gradients(self) -> bool:
        """Discard gradients that code outside the Trainer left behind. Returns whether there were any."""
        found = False
        for parameter in self._all_parameters:
            if parameter.grad is not None:
                parameter.grad, found = None, True
        return found

    def _finish_gradients(self, step: int, factor: Tensor | float | None) -> StepGradients:
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() costs 2 µs
        try:
            gradients = self._gradients(step)
            if factor is not None:
                gradients.multiply(factor)
            for hook in self._hooks.on_gradients:
                hook(gradients)
        finally:
            torch._C._set_grad_enabled(enabled)
        return gradients

    def _gradients(self, step: int) -> StepGradients:
        having = [p for p in self._parameters if p.grad is not None]
        if self._held is None:
            return StepGradients(step, [p.grad for p in having])
        return StepGradients(step, [local_shard(p.grad) for p in having], self._held.norm_of(having))

    def _take_step(self) -> Tensor | float | None:
        try:
            for take_step in self._hooks.take_step:
                skipped: Tensor | float | None = take_step()
                return skipped
            (self.optimizer if self._fused is None else self._fused).step()
        except Exception as error:
            raise_on_mixed_tensors(error, self.optimizer)
            if asks_for_closure(error):
                raise needs_closure(self.optimizer) from error
            raise
        return None
