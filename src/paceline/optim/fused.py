"""Steps of torch's fused optimizers without their bookkeeping.

In every step, torch.optim.AdamW looks up the state of each parameter, groups all tensors by device and dtype and opens
a profiler range; for a small model this costs several times as much as its two kernels. `FusedStep` keeps the arguments
of the kernels and verifies, by identity, that torch would pass the same ones. Everything else is a step of torch's
own: the first one, after any change to groups, state or the set of gradients, and while there are hooks, a profiler, a
tensor as learning rate or a graph capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_Group = dict[str, Any]
_Members = tuple[list[Tensor], list[Tensor], tuple[str, ...]]  # all, those without a gradient, keys of the state
_TORCH = str(Path(torch.__file__).parent)
# Adding it to CPU tensors takes half the time of adding a number.
_ONE = torch.ones((), dtype=torch.float32, device="cpu")


@dataclass(slots=True)
class _Part:
    """Parameters of a group with the same device and dtype, and their state."""

    group: int
    params: list[Tensor]
    state: list[list[Tensor]]
    dtype: torch.dtype
    device: int  # -1: cpu


@dataclass(slots=True)
class _Plan:
    """What the last step of torch saw, and the arguments that follow from it."""

    step: Any  # of the class
    patched: Any  # the step of the instance, if a learning rate scheduler has wrapped it
    hooks: dict[int, Any]
    owners: list[Tensor]  # of the state
    state: list[Any]
    groups: list[_Members]
    parts: list[_Part]
    on_gpu: bool


_FLAGS = ("grad_scale", "found_inf")  # of torch.amp.GradScaler
_ADAM_STATE, _SGD_STATE = ("exp_avg", "exp_avg_sq", "step"), ("momentum_buffer",)


def is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


class FusedStep:
    """Steps `optimizer`, with the same result as `optimizer.step()`. Hooks on its steps of the type `skipped`
    are not called."""

    def __init__(self, optimizer: Optimizer, skipped: type) -> None:
        self._optimizer, self._skipped = optimizer, skipped
        self._keys, self._run = _KINDS[type(optimizer)]
        self._plan: _Plan | None = None

    @staticmethod
    def supports(optimizer: Optimizer) -> bool:
        return type(optimizer) in _KINDS and all(group["fused"] for group in optimizer.param_groups)

    def forget(self) -> None:
        """Keep no reference to the state, which is about to be replaced."""
        self._plan = None

    def step(self) -> None:
        plan, optimizer = self._plan, self._optimizer
        gradients = None if plan is None else self._gradients(plan)
        if plan is None or gradients is None:
            self._plan = None  # its state may have been replaced: free the memory
            optimizer.step()
            self._plan = self._make_plan()
            return
        scale, overflow = map(optimizer.__dict__.get, _FLAGS)
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() costs 2 µs
        try:
            for part, own in zip(plan.parts, gradients, strict=True):
                self._run(optimizer.param_groups[part.group], part, own, scale, overflow)
        finally:
            torch._C._set_grad_enabled(enabled)

    def _gradients(self, plan: _Plan) -> list[list[Tensor]] | None:
        """The gradients of each part; None if torch might do anything else than it did in its last step."""
        optimizer = self._optimizer
        if (
            type(optimizer).step is not plan.step
            or optimizer.__dict__.get("step") is not plan.patched
            or optimizer._optimizer_step_pre_hooks != plan.hooks
            or _is_observed(optimizer)
            or (plan.on_gpu and torch.cuda.is_current_stream_capturing())
        ):
            return None
        groups, state = optimizer.param_groups, optimizer.state
        if len(groups) != len(plan.groups) or len(state) != len(plan.owners) or not all(map(is_, state, plan.owners)):
            return None
        held = _flat(state)
        if len(held) != len(plan.state) or not all(map(is_, held, plan.state)):
            return None
        for group, (params, idle, keys) in zip(groups, plan.groups, strict=True):
            if len(params) != len(group["params"]) or not all(map(is_, group["params"], params)):
                return None
            if self._keys(group) is not keys or (idle and any(parameter.grad is not None for parameter in idle)):
                return None
        gradients = []
        flags = [optimizer.__dict__[name] for name in _FLAGS if optimizer.__dict__.get(name) is not None]
        for part in plan.parts:
            device, dtype = part.device, part.dtype
            if flags and any(flag.get_device() != device for flag in flags):
                return None
            own = [
                gradient
                for parameter in part.params
                if (gradient := parameter.grad) is not None
                and gradient.dtype is dtype
                and gradient.layout is torch.strided
                and gradient.get_device() == device
            ]
            if len(own) != len(part.params):
                return None
            gradients.append(own)
        return gradients

    def _make_plan(self) -> _Plan | None:
        """Call after a step of torch's own, which has validated everything and created the state."""
        optimizer = self._optimizer
        step: Any = type(optimizer).step
        patched: Any = optimizer.__dict__.get("step")
        hooks = dict(optimizer._optimizer_step_pre_hooks)
        by_scheduler = hasattr(patched, "_wrapped_by_lr_sched") and patched.__wrapped__ is step
        if not _is_torchs_own(step) or (patched is not None and not by_scheduler):
            return None  # replaced by somebody
        if _is_observed(optimizer) or not all(isinstance(hook, self._skipped) for hook in hooks.values()):
            return None
        groups: list[_Members] = []
        parts: list[_Part] = []
        for number, group in enumerate(optimizer.param_groups):
            params, keys = list(group["params"]), self._keys(group)
            held = [parameter for parameter in params if parameter.grad is not None]
            if keys is None or any(type(parameter) not in (Tensor, nn.Parameter) for parameter in held):
                return None
            state = [[optimizer.state[parameter].get(key) for parameter in held] for key in keys]
            if any(tensor is None for tensors in state for tensor in tensors):
                return None
            groups.append((params, [parameter for parameter in params if parameter.grad is None], keys))
            split: Any = Optimizer._group_tensors_by_device_and_dtype([held, *state]) if held else {}
            for (_, dtype), ((same, *own), _) in split.items():
                parts.append(_Part(number, same, own, dtype, same[0].get_device()))
        owners, flat, on_gpu = list(optimizer.state), _flat(optimizer.state), any(part.device >= 0 for part in parts)
        return _Plan(step, patched, hooks, owners, flat, groups, parts, on_gpu)


def _flat(state: dict[Tensor, dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, state.values())))


def _is_torchs_own(step: Any) -> bool:
    """Whether the step of a class and all that it wraps are code of torch."""
    while step is not None:
        if not step.__code__.co_filename.startswith(_TORCH):
            return False
        step = getattr(step, "__wrapped__", None)
    return True


def _is_observed(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )


def _adam_keys(group: _Group) -> tuple[str, ...] | None:
    """The keys of the state; None if a step is not one call of a fused kernel for each device and dtype."""
    plain = group["fused"] and not (group["amsgrad"] or group["capturable"] or group["differentiable"])
    return _ADAM_STATE if plain and type(group["lr"]) is float else None


def _sgd_keys(group: _Group) -> tuple[str, ...] | None:
    if not group["fused"] or group["foreach"] or group["differentiable"] or type(group["lr"]) is not float:
        return None
    return _SGD_STATE if group["momentum"] else ()


def _adam(group: _Group, part: _Part, gradients: list[Tensor], scale: Tensor | None, overflow: Tensor | None) -> None:
    averages, squares, steps = part.state
    first, second = group["betas"]
    if part.device < 0:
        torch._foreach_add_(steps, _ONE, alpha=1.0)
    else:
        torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        part.params,
        gradients,
        averages,
        squares,
        [],
        steps,
        lr=group["lr"],
        beta1=first,
        beta2=second,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        grad_scale=scale,
        found_inf=overflow,
    )
    if overflow is not None:
        torch._foreach_sub_(steps, [overflow] * len(steps))


def _sgd(group: _Group, part: _Part, gradients: list[Tensor], scale: Tensor | None, overflow: Tensor | None) -> None:
    torch._fused_sgd_(
        part.params,
        gradients,
        part.state[0] if part.state else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=scale,
        found_inf=overflow,
    )


_KINDS = {SGD: (_sgd_keys, _sgd), Adam: (_adam_keys, _adam), AdamW: (_adam_keys, _adam)}
