"""The backward of a scalar loss without the Python code of `Tensor.backward`.

`Tensor.backward` looks for overrides, converts its arguments, compares their shapes, and fills a gradient of one if it
is not given: 17 of the 77 µs that the backward of a two-layer MLP takes on a CPU. All of this is known for a loss of
the Trainer, so the engine is called as `torch.autograd.backward` calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

_torch_backward = Tensor.backward


def run_backward(value: Tensor, seed: Tensor, *more: tuple[Tensor, Tensor]) -> None:
    """`value.backward(seed)`, together with `more` of such pairs. Overrides are called as ever: of a subclass, of a
    function mode, or a patch."""
    is_plain = type(value) is Tensor and not value.dim() and Tensor.backward is _torch_backward
    if is_plain and not torch._C._is_torch_function_mode_enabled():
        roots, seeds = zip((value, seed), *more, strict=True)
        _engine_run_backward(roots, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        for root, gradient in ((value, seed), *more):
            root.backward(gradient)
