"""What `train()` returns: plain records, equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass
class History:
    """The steps and evaluations of one call of `train()`, and the folder of the run."""

    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    run: str | None = None
    ended: str | None = None  # why: the data ended, max_steps, early_stop, …

    @property
    def losses(self) -> list[float]:
        return [float(record["loss"]) for record in self.steps]

    @property
    def best(self) -> Record | None:
        """The evaluation with the lowest loss."""
        finite = [record for record in self.evaluations if math.isfinite(record["loss"])]
        return min(finite, key=lambda record: float(record["loss"]), default=None)

    def to_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "evaluations": self.evaluations, "run": self.run, "ended": self.ended}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> History:
        return cls(list(values["steps"]), list(values["evaluations"]), values["run"], values["ended"])
