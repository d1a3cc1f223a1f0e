"""fp16's loss scale: torch's GradScaler, which also knows which steps it skipped, and can keep its scale.

Gradients of float16 products fall out of its range unless the loss is scaled up; a scale that is too high makes them
infinite. Such a step is skipped and the scale goes down; after a while without any it goes up again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.config.sections import ScalerSection as Settings


class Scaler(torch.amp.GradScaler):
    """`overflowed` is the last step's flag, on the device: 1.0 where the step was skipped."""

    def __init__(
        self,
        device: torch.device,
        settings: Settings,
        *,
        enabled: bool,
        agree: Callable[[Tensor], object] | None = None,
    ) -> None:
        """`agree` makes a flag the highest of all ranks': where each sees only its part of the gradients."""
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
        self._agree = agree

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self._agree is not None and self.is_enabled():
            for flag in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                self._agree(flag)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if not self.is_enabled():
            return
        # Ranks that hold the same reduced gradients skip the same steps without asking each other.
        found = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        self.overflowed = found[0] if len(found) == 1 else sum(flag.to(found[0].device) for flag in found)
        super().update(self._scale if self._static else new_scale)
