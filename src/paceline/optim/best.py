"""The best value of a metric so far, for best checkpoints, early stopping and the plateau schedule."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from paceline.config.components import smaller_is_better


class Best:
    """The best value of a metric.

    `mode` is "min" or "max"; None: as usual for a metric of that name. An improvement
    must exceed `min_delta` + `min_change` × |best|. NaN and infinity are never improvements.
    """

    def __init__(self, metric: str, mode: str | None = None, min_delta: float = 0.0, min_change: float = 0.0) -> None:
        smaller = smaller_is_better(metric) if mode is None else mode == "min"
        self.mode = "min" if smaller else "max"
        self.value: float | None = None
        self._min_delta, self._min_change = min_delta, min_change

    def improved(self, value: float) -> bool:
        """Whether this is the best value so far; if so, it is stored."""
        if not isfinite(value) or not self._beats(value):
            return False
        self.value = value
        return True

    def _beats(self, value: float) -> bool:
        if self.value is None:
            return True
        gain = self.value - value if self.mode == "min" else value - self.value
        return gain > self._min_delta + self._min_change * abs(self.value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]
