"""Which numbers a model computes in.

`fp32` is torch's default; `fp64` is for proofs: two layouts that agree in float64 do the same algebra, and what they
differ by in float32 is rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def prepare_model(model: nn.Module, precision: str) -> None:
    if precision == "fp64":
        model.double()


def input_cast(precision: str) -> Callable[[Tensor], Tensor] | None:
    """What turns an input into the model's numbers; None where it has them already. Whole numbers stay as they are."""
    return _to_double if precision == "fp64" else None


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
