"""A trial of a study, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TrialStatus = Literal["running", "paused", "complete", "pruned", "failed"]


@dataclass(frozen=True)
class Trial:
    number: int
    params: Mapping[str, Any]  # by the key of the recipe
    state: TrialStatus
    value: float | None = None  # of the metric: the last one
    values: Mapping[int, float] = field(default_factory=dict)  # by step
    rung: int = 0  # that it has reached, or trains to
    rung_values: Mapping[int, float] = field(default_factory=dict)
    attempts: int = 0  # how often it was started
    accidents: int = 0  # after which it was started again
    completed_before: int = 0  # how many of its launches had ended well before the present one
    steps: int = 0
    seconds: float = 0.0
    slot: str = ""  # where it ran
    verdict: str = ""  # why it failed

    @property
    def has_ended(self) -> bool:
        return self.state in ("complete", "pruned", "failed")
