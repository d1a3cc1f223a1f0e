"""Loss scaling for fp16: a GradScaler that also reports skipped steps and supports a static scale.

Without scaling, small gradients underflow in float16; with too large a scale they overflow. A step that overflows is
skipped and the scale is reduced; after `growth_interval` steps without overflow it grows again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.config.sections import ScalerSection as Settings


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
