"""Finds code that sees the gradients of activations: hooks on tensors and modules, and autograd functions.

A backward usually starts from the gradient of a rank's own mean, because DDP and FSDP average the gradients of
parameters over ranks. That of an activation is then larger than in one process. It makes a difference only to code that
sees it and is not linear: clamping, a threshold, a log. For such code, backwards start from the gradient of the global
mean instead (`Stepper.start_from_global_mean`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from paceline.run.user_frame import place_of

# They see gradients to gather or to free parameters, or to run a forward again.
_OF_LIBRARIES = ("torch.distributed.", "torch.utils.checkpoint", "torch._", "paceline.")
_OBSERVING = {Tensor.register_hook, Tensor.retain_grad}


class BackwardWatch(TorchFunctionMode):
    """Within this context, notes what sees gradients of activations in a forward and a backward of `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.hooks = [
            f"a backward hook of {name or 'the model'}" for name, part in model.named_modules() if _hooked(part)
        ]
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


def _hooked(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


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
