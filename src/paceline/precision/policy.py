"""Which numbers a model computes in.

| precision | weights | matrix products                    | for                                                     |
|-----------|---------|------------------------------------|---------------------------------------------------------|
| fp32      | float32 | float32, or tf32 with `tf32: true` | the default                                             |
| bf16      | float32 | bfloat16, by autocast              | GPUs since Ampere, new CPUs                             |
| fp16      | float32 | float16, by autocast, loss scaled  | older GPUs                                              |
| fp64      | float64 | float64                            | proofs: what differs only in float32 is rounding        |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare_model(model: nn.Module, precision: str) -> None:
    if precision == "fp64":
        model.double()


def input_cast(precision: str) -> Callable[[Tensor], Tensor] | None:
    """What turns an input into the model's numbers; None where it has them already. Whole numbers stay as they are."""
    return _to_double if precision == "fp64" else None


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def autocast(precision: str, device: torch.device) -> torch.autocast | None:
    """The context that a forward runs in; it may be entered again and again."""
    dtype = _HALF.get(precision)
    return None if dtype is None else torch.autocast(device.type, dtype)


def allow_tf32(allowed: bool) -> None:
    """torch's switch, for the whole process; convolutions have one of their own."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
