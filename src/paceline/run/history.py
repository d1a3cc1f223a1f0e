"""The result of `train()`: plain records, equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import TrainError

Record = dict[str, Any]

RESERVED = {"step", "epoch", "loss", "lr", "grad_norm", "skipped", "time", "samples_per_second", "evaluation"}


def require_free_names(names: Iterable[str], where: str) -> None:
    taken = sorted(RESERVED.intersection(names))
    if taken:
        raise TrainError(
            "reserved-name",
            f"{where}: the name {taken[0]!r} is reserved.",
            fix=f"choose another name; reserved are {', '.join(sorted(RESERVED))}",
        )


@dataclass
class History:
    """Steps and evaluations of one `train()` call, and the run folder."""

    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    run: str | None = None
    ended: str | None = None  # why: end of data, max_steps, early_stop, …

    @property
    def losses(self) -> list[float]:
        """The loss of every step in `steps`."""
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
