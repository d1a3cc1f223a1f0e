"""Precision policies: the dtypes of weights and of matrix products.

| precision | weights | matrix products                    | for                                                     |
|-----------|---------|------------------------------------|---------------------------------------------------------|
| fp32      | float32 | float32, or tf32 with `tf32: true` | the default                                             |
| bf16      | float32 | bfloat16, by autocast              | GPUs since Ampere, new CPUs                             |
| fp16      | float32 | float16, by autocast, loss scaled  | older GPUs                                              |
| fp64      | float64 | float64                            | tests: differences that vanish in float64 are rounding  |

The loss scaler of fp16 also reports skipped steps and supports a static scale. Without scaling, small gradients
underflow in float16; with too large a scale they overflow. A step that overflows is skipped and the scale is reduced;
after `growth_interval` steps without overflow it grows again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.overrides import TorchFunctionMode

from paceline.config.components import PRECISIONS
from paceline.config.sections import ScalerSection as Settings


@dataclass(frozen=True)
class Precision:
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None  # of matrix products, if not that of the weights


PRECISIONS.implement("fp32")(Precision)
PRECISIONS.implement("bf16")(partial(Precision, autocast=torch.bfloat16))
PRECISIONS.implement("fp16")(partial(Precision, autocast=torch.float16))
PRECISIONS.implement("fp64")(partial(Precision, weights=torch.float64))


def _find(precision: str) -> Precision:
    found: Precision = PRECISIONS.find(precision)()
    return found


def half_dtype(precision: str) -> torch.dtype | None:
    """The half-precision dtype of matrix products, if any."""
    return _find(precision).autocast


def prepare_model(model: nn.Module, precision: str) -> None:
    if _find(precision).weights is torch.float64:
        model.double()


def prepare_optimizer(optimizer: torch.optim.Optimizer, precision: str) -> None:
    """Adagrad, for example, creates its state together with the optimizer, in the dtype that the weights then have."""
    if _find(precision).weights is torch.float64:
        for state in optimizer.state.values():
            state.update({name: _to_double(v) for name, v in state.items() if isinstance(v, Tensor) and v.dim()})


def input_cast(precision: str) -> Callable[[Tensor], Tensor] | None:
    """Casts floating-point inputs to the dtype of the model; None if no cast is needed."""
    return _to_double if _find(precision).weights is torch.float64 else None


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def forward_context(precision: str, device: torch.device) -> AbstractContextManager[Any] | None:
    """The context of forward passes, if one is needed. It may be entered several times."""
    chosen = _find(precision)
    if chosen.weights is torch.float64:
        return _KeepDouble()
    return None if chosen.autocast is None else torch.autocast(device.type, chosen.autocast)


class _KeepDouble(TorchFunctionMode):
    """Ignores explicit casts from float64 to float32, which models make for half precision: `logits.float()`
    in a Hugging Face loss, `softmax(…, dtype=torch.float32)`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:  # integers too: the next operation combines them with float64
            return args[0].to(torch.float64)
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if func is Tensor.to:
                args = tuple(torch.float64 if argument is torch.float32 else argument for argument in args)
        return func(*args, **kwargs)


def allow_tf32(allowed: bool) -> None:
    """Set torch's global flags, for matrix products and for convolutions."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


class Scaler(torch.amp.GradScaler):
    """`overflowed` is a tensor on the device: 1.0 if the last step was skipped."""

    def __init__(
        self,
        device: torch.device,
        settings: Settings,
        *,
        enabled: bool,
        reduce_max: Callable[[Tensor], object] | None = None,
    ) -> None:
        """`reduce_max` reduces a flag across ranks, in place, if each rank sees only its shard of the gradients."""
        super().__init__(
            device.type,
            init_scale=settings.initial,
            growth_factor=settings.growth,
            backoff_factor=settings.backoff,
            growth_interval=settings.growth_interval,
            enabled=enabled,
        )
        self._static = settings.static
        self.overflowed: Tensor | None = None
        self._reduce_max = reduce_max

    def current(self) -> Tensor:
        """The current loss scale, on the device."""
        assert self._scale is not None
        return self._scale

    def has_scaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of a step still have the loss scale."""
        return self.is_enabled() and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self._reduce_max is not None and self.is_enabled():
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                self._reduce_max(flag)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if not self.is_enabled():
            return
        # Ranks with the same reduced gradients skip the same steps, without communication.
        found = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        self.overflowed = found[0] if len(found) == 1 else sum(flag.to(found[0].device) for flag in found)
        super().update(self._scale if self._static else new_scale)
