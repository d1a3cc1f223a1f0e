"""Hooks on the gradients of parameters (`parameter.register_hook`), applied to the gradient of a step.

In a backward they would see the gradient of one micro-batch on one rank, before it is reduced: clipping or masking it
there gives another result on another number of ranks. So they are skipped in backwards, and called once per step with
the reduced gradient of the full parameter. Handles stay valid: removing one has its usual effect.

One rank without accumulation is left alone.

Hooks on tensors and modules, and autograd functions, see gradients of activations. A backward usually starts from the
gradient of a rank's own mean, because DDP and FSDP average the gradients of parameters over ranks; that of an
activation is then larger than in one process. It makes a difference to code that is not linear: clamping, a threshold,
a log. If `BackwardInspector` finds such code, backwards start from the gradient of the global mean instead
(`LossWeights.start_from_global_mean`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from paceline.errors import TrainError
from paceline.optim.clip import StepGradients
from paceline.parallel.shards import copy_shard_
from paceline.run.user_frame import place_of
from paceline.runtime import collectives
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks, HookTable

# They see gradients to gather or to free parameters, or to run a forward again.
_OF_LIBRARIES = ("torch.distributed.", "torch.utils.checkpoint", "torch._", "paceline.")
_OBSERVING = {Tensor.register_hook, Tensor.retain_grad}
_Hooks = MutableMapping[int, Callable[[Tensor], Tensor | None]]


def build(context: FeatureContext) -> Hooks | None:
    hooks = GradientHooks(context.parts.model, context.original_hooks, context.table)
    return hooks.find() if context.world.size > 1 or context.bound.held is not None else hooks.slots()


class DeferredHook:
    """Takes the place of a hook, and does nothing when a backward calls it."""

    __slots__ = ("hook",)

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor) -> None:
        return None


def hooks_of(model: nn.Module) -> dict[str, _Hooks]:
    """The hooks of each parameter by name. Layouts replace parameters, without their hooks."""
    return {name: hooks for name, p in model.named_parameters() if (hooks := p._backward_hooks)}


class GradientHooks:
    """The hooks of a model. `before`: those that it had before a layout was applied."""

    def __init__(self, model: nn.Module, before: Mapping[str, _Hooks], table: HookTable) -> None:
        self._model, self._before, self._table = model, before, table
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self._found: dict[int, list[_Hooks]] = {}  # those that are deferred, by the index of the parameter

    def begin(self, groups: int) -> None:
        if groups > 1 or self._parameters:
            self._table.set(self.find())

    def slots(self) -> Hooks:
        """`on_gradients`: once there are hooks."""
        return Hooks(
            name="gradient_hooks",
            begin=self.begin,
            before_forward=self.defer if self._parameters else None,
            on_gradients=self.apply if self._found else None,
        )

    def find(self) -> Hooks:
        """Defer hooks from now on."""
        if not self._parameters:
            self._parameters = list(self._model.named_parameters())
            for number, (name, _) in enumerate(self._parameters):
                if name in self._before:
                    self._defer(number, self._before[name])
        self._find()
        return self.slots()

    def defer(self, first: bool) -> None:
        """Find new hooks, before each step."""
        if first:
            known = len(self._found)
            self._find()
            if len(self._found) > known == 0:
                self._table.set(self.slots())

    def _find(self) -> None:
        """100 ns per parameter."""
        for number, (name, parameter) in enumerate(self._parameters):
            hooks: Any = parameter._backward_hooks  # without a call for each parameter
            if hooks:
                self._defer(number, hooks)
            if parameter._post_accumulate_grad_hooks and collectives.world() > 1:
                raise _post_accumulate_error(name)

    def _defer(self, number: int, hooks: _Hooks) -> None:
        for key, hook in hooks.items():
            if type(hook) is not DeferredHook:
                hooks[key] = DeferredHook(hook)
        found = self._found.setdefault(number, [])
        if not any(hooks is each for each in found):
            found.append(hooks)

    def apply(self, _: StepGradients) -> None:
        """Call the hooks with the gradients of the parameters, which are complete."""
        for number, found in self._found.items():
            parameter = self._parameters[number][1]
            for hook in [each.hook for hooks in found for each in hooks.values() if isinstance(each, DeferredHook)]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                # Not a DTensor: a hook may combine it with plain tensors, such as a mask.
                full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                result = hook(full)
                # In place, because the optimizer may hold the shard of this rank.
                if isinstance(gradient, DTensor) or (result is not None and result is not full):
                    copy_shard_(gradient, full if result is None else result)


def _post_accumulate_error(name: str) -> TrainError:
    return TrainError("post-accumulate-hook", f"{name} has a hook of register_post_accumulate_grad_hook.")


class BackwardInspector(TorchFunctionMode):
    """Within this context, notes what sees gradients of activations in a forward and a backward of `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        hooked = [name for name, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
        self.hooks = [f"a backward hook of {name or 'the model'}" for name in hooked]
        if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
            self.hooks.append("a global backward hook of modules")
        self.functions: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OBSERVING and not isinstance(args[0], nn.Parameter):
            hook = args[1] if len(args) > 1 else (kwargs or {}).get("hook")
            if not str(getattr(hook, "__module__", "")).startswith(_OF_LIBRARIES):
                self.hooks.append(f"a hook on a tensor{place_of(hook)}" if hook is not None else "retain_grad()")
        elif func is Tensor.backward and len(args) == 1 and not any((kwargs or {}).values()):
            self.functions += _functions(args[0])
            with self:  # a forward that is run again in the backward may register hooks
                seeds = (torch.ones_like(args[0]),)
                _engine_run_backward(args, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
            return None
        return func(*args, **(kwargs or {}))


def _functions(loss: Tensor) -> list[str]:
    """The autograd functions of the user in the graph of a loss."""
    found, todo, seen = list[str](), list[Any]([loss.grad_fn]), set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo.extend(following for following, _ in node.next_functions)
        if isinstance(node, BackwardCFunction):
            kind: type = type(node)._forward_cls  # type: ignore[attr-defined]
            if not kind.__module__.startswith(("torch.", "paceline.")):
                found.append(kind.__name__)
    return found
