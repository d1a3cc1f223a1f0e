"""Runs a model on fake tensors, uncompiled, to count the FLOPs of its forward and backward. Nothing is computed, and
what the forward changes is restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from paceline.data.batches import apply
from paceline.guard import snapshot
from paceline.models.loss_module import LossModule
from paceline.monitor.flops import FlopCount
from paceline.runtime.noise import NoiseContext

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def count_on_fakes(module: LossModule, batch: Any, draw: NoiseContext, user_code: Sequence[Any]) -> FlopCount:
    """Raises what the forward raises, such as for values that it depends on."""
    with (
        snapshot.preserved(module, *user_code),
        torch.compiler.set_stance("force_eager"),
        draw.uninstalled(),
        _without_hooks(module),
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
    ):
        for part in module.modules():
            if isinstance(part, _NormBase):
                part.training = False  # synchronized ones would communicate
        module.weighs = False
        count = FlopCount()
        with count:
            value, _ = functional_call(module, _full_members(module), (apply(batch, fake.from_tensor),))
            value.backward()
    return count


def _full_members(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, which may be sharded, as full tensors without data; and buffers."""
    parameters = {
        name: torch.empty(p.shape, dtype=p.dtype, device=p.device, requires_grad=p.requires_grad)
        for name, p in module.named_parameters()
    }
    return parameters | dict(module.named_buffers())


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """In hooks, FSDP gathers parameters, and ranks compare the order of modules."""
    kept = [(hooks, dict(hooks)) for part in module.modules() for name in _HOOKS if (hooks := getattr(part, name))]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, members in kept:
            hooks.update(members)
