"""The parameter update, from the reduced gradients of a step.

In this order: what features do to reduced gradients, the factor of data-dependent weights, what they do to finished
gradients, whether they veto the step, what they set before it, the optimizer, and what follows its parameters. Which
these are, and in which order, says `features/table.py`.

Norms of sharded gradients are over all ranks, or with local steps over those of a replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from paceline.optim.clip import StepGradients, total_norm
from paceline.optim.fused import FusedStep
from paceline.parallel.fsdp import reduced_check
from paceline.parallel.optimizer_binding import assign_shard_gradients, raise_on_mixed_tensors
from paceline.parallel.shards import is_primary_shard, local_shard
from paceline.runtime.mesh import Mesh
from paceline.train.checks.foreign_steps import RequireOwner
from paceline.train.checks.preflight import unused_parameters_error
from paceline.train.checks.unsupported import asks_for_closure, needs_closure
from paceline.train.hooks import HookTable


class HeldParams:
    """The model's sharded parameters, mapped to the tensors that the optimizer holds for them."""

    def __init__(
        self,
        model: nn.Module,
        held: Mapping[Tensor, Tensor],
        mesh: Mesh,
        copies: frozenset[str],
        *,
        allow_unused: bool = True,
        used: set[nn.Parameter] | None = None,
    ) -> None:
        self._model, self._held, self._device, self._group = model, held, mesh.device, mesh.step_group
        self._allow_unused = allow_unused
        self._require_reduced = reduced_check(model)
        self._used = used  # in the backwards since the last step; None: gradients of unused parameters are None
        self._counted = {
            held.get(parameter, parameter)
            for name, parameter in model.named_parameters()
            if name not in copies and is_primary_shard(parameter, mesh)
        }

    def held_of(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer holds for `parameter`."""
        return self._held.get(parameter, parameter)

    def assign_gradients(self) -> None:
        """A parameter that is unused on this rank only is an error: FSDP2 would silently reduce the gradients of
        different parameters into each other."""
        self._require_reduced()
        if self._used is not None:
            self._drop_unused(self._used)
        if not assign_shard_gradients(self._held) and not self._allow_unused:
            names = [n for n, p in self._model.named_parameters() if p in self._held and p.requires_grad]
            raise unused_parameters_error(self._model, [n for n in names if self._model.get_parameter(n).grad is None])

    def _drop_unused(self, used: set[nn.Parameter]) -> None:
        """Remove the gradients of parameters that no rank has used, as on one rank."""
        parameters = list(self._model.parameters())
        flags = torch.tensor([parameter in used for parameter in parameters], dtype=torch.uint8, device=self._device)
        torch_dist.all_reduce(flags, op=torch_dist.ReduceOp.MAX, group=self._group)
        for parameter, flag in zip(parameters, flags.tolist(), strict=True):
            if not flag:
                parameter.grad = None
        used.clear()

    def norm_of(self, parameters: list[Tensor]) -> Callable[[list[Tensor]], Tensor]:
        """Return a function that computes the global norm of gradients of `parameters`, counting each shard once."""
        counted = [parameter in self._counted for parameter in parameters]

        def norm(gradients: list[Tensor]) -> Tensor:
            local = total_norm([gradient for gradient, counts in zip(gradients, counted, strict=True) if counts])
            square = local.to(self._device, torch.float64).square()
            torch_dist.all_reduce(square, group=self._group)
            # Not the local norm's dtype: a rank that counts no shard must get the same bits as the others.
            dtypes = [gradient.dtype for gradient in gradients]
            return square.sqrt().to(torch.float64 if torch.float64 in dtypes else torch.float32)

        return norm


class OptimizerUpdate:
    """Updates the parameters. `stepped`: whether the last step was taken, as the host knows it; `skipped` is 1.0 if it
    was skipped, on the device or as a float."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, module: nn.Module, held: HeldParams | None, hooks: HookTable
    ) -> None:
        self.optimizer, self._held, self._hooks = optimizer, held, hooks
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
        self.is_changing, self.stepped, self.skipped = False, stepped, skipped
        for parameter in self._all_parameters:
            parameter.grad = None
        return norm

    def replay(self, captured: Callable[[], Tensor | float | None]) -> None:
        """Run a captured `apply`, which returns what it skipped, after `prepare`."""
        self.is_changing = True
        self.skipped = captured()
        self.is_changing, self.stepped = False, True

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
