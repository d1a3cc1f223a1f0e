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
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.config.components import PRECISIONS


@dataclass(frozen=True)
class Precision:
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None  # what matrix products are computed in, where that is not the weights' own


@PRECISIONS.implement("fp32")
def fp32() -> Precision:
    return Precision()


@PRECISIONS.implement("bf16")
def bf16() -> Precision:
    return Precision(autocast=torch.bfloat16)


@PRECISIONS.implement("fp16")
def fp16() -> Precision:
    return Precision(autocast=torch.float16)


@PRECISIONS.implement("fp64")
def fp64() -> Precision:
    return Precision(weights=torch.float64)


def _named(precision: str) -> Precision:
    found: Precision = PRECISIONS.find(precision)()
    return found


def half(precision: str) -> torch.dtype | None:
    """The half precision that weights are cast to for a matrix product, where there is one."""
    return _named(precision).autocast


def prepare_model(model: nn.Module, precision: str) -> None:
    if _named(precision).weights is torch.float64:
        model.double()


def input_cast(precision: str) -> Callable[[Tensor], Tensor] | None:
    """What turns an input into the model's numbers; None where it has them already. Whole numbers stay as they are."""
    return _to_double if _named(precision).weights is torch.float64 else None


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def forward_context(precision: str, device: torch.device) -> AbstractContextManager[Any] | None:
    """What a forward runs in; it may be entered again and again."""
    chosen = _named(precision)
    if chosen.weights is torch.float64:
        return _StayDouble()
    return None if chosen.autocast is None else torch.autocast(device.type, chosen.autocast)


class _StayDouble(TorchFunctionMode):
    """Models that widen to float32 by hand, for the sake of half precision, would narrow in float64: `logits.float()`
    in a Hugging Face loss, `softmax(…, dtype=torch.float32)`. Here they keep what they have."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:  # whole numbers too: they meet the others in the next operation
            return args[0].to(torch.float64)
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if func is Tensor.to:
                args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        return func(*args, **kwargs)


def allow_tf32(allowed: bool) -> None:
    """torch's switch, for the whole process; convolutions have one of their own."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
