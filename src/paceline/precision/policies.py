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
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def half(precision: str) -> torch.dtype | None:
    """The half precision that weights are cast to for a matrix product, where there is one."""
    return _HALF.get(precision)


def prepare_model(model: nn.Module, precision: str) -> None:
    if precision == "fp64":
        model.double()


def input_cast(precision: str) -> Callable[[Tensor], Tensor] | None:
    """What turns an input into the model's numbers; None where it has them already. Whole numbers stay as they are."""
    return _to_double if precision == "fp64" else None


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def forward_context(precision: str, device: torch.device) -> AbstractContextManager[Any] | None:
    """What a forward runs in; it may be entered again and again."""
    if precision == "fp64":
        return _StayDouble()
    dtype = _HALF.get(precision)
    return None if dtype is None else torch.autocast(device.type, dtype)


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
