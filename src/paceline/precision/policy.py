"""Which numbers a model computes in.

`fp32` is torch's default; `fp64` is for proofs: two layouts that agree in float64 do the same algebra, and what they
differ by in float32 is rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def prepare_model(model: nn.Module, precision: str) -> None:
    if precision == "fp64":
        model.double()


def prepare_tensor(tensor: Tensor, precision: str) -> Tensor:
    """An input in the model's numbers; whole numbers stay what they are."""
    if precision == "fp64" and tensor.is_floating_point():
        return tensor.to(torch.float64)
    return tensor
