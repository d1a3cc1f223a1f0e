"""The schedule that looks at results: cut the learning rate when evaluations no longer improve.

It means what torch's ReduceLROnPlateau with a relative threshold means. One difference: the threshold is relative to
the size of the best value, where torch takes a worse negative value for an improvement. The learning rate of a step is
the highest one × `Schedule.factor(step)` (the warm-up) × `scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.optim.best import Best


class Plateau:
    """After more than `patience` evaluations without an improvement `scale` is multiplied by `factor`."""

    def __init__(
        self, factor: float, patience: int, threshold: float, mode: str | None, floor: float, metric: str = "loss"
    ) -> None:
        self._factor, self._patience, self._floor = factor, patience, floor
        self._best = Best(metric, mode, min_change=threshold)
        self._waited = 0
        self.scale = 1.0

    def observe(self, value: float) -> bool:
        """Take in an evaluation's result; whether that cut the learning rate."""
        if self._best.improved(value):
            self._waited = 0
            return False
        self._waited += 1
        if self._waited <= self._patience:
            return False
        self._waited = 0
        before, self.scale = self.scale, max(self.scale * self._factor, self._floor)
        return self.scale < before

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "waited": self._waited, "best": self._best.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scale, self._waited = state["scale"], state["waited"]
        self._best.load_state_dict(state["best"])
