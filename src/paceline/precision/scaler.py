"""fp16's loss scale: torch's GradScaler, which also knows which steps it skipped, and can keep its scale.

Gradients of float16 products fall out of its range unless the loss is scaled up; a scale that is too high makes them
infinite. Such a step is skipped and the scale goes down; after a while without any it goes up again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.sections import Scaler as Settings


class Scaler(torch.amp.GradScaler):
    """`overflowed` is the last step's flag, on the device: 1.0 where the step was skipped."""

    def __init__(self, device: torch.device, settings: Settings, *, enabled: bool) -> None:
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

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if not self.is_enabled():
            return
        # All ranks hold the same reduced gradients, so they skip the same steps without asking each other.
        found = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        self.overflowed = found[0] if len(found) == 1 else sum(flag.to(found[0].device) for flag in found)
        super().update(self._scale if self._static else new_scale)
