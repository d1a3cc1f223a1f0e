"""The parts of a step, from the times of many steps on all ranks, as a table.

All figures are medians over steps, and over ranks. Medians of parts do not add up to the median of steps exactly: the
table has the residue. Log points, and rounds of `sync: {every: …}`, come every few steps: their time is spread evenly
over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from paceline.tools.watch.sheet import page, paragraph, table, time_bar

DATA, FORWARD, BACKWARD, COMMUNICATION = "data", "forward", "backward", "communication"
OPTIMIZER, LOGGING, OTHER = "optimizer", "logging", "other"
BOTH = "forward + backward"  # of a pipeline, whose schedule interleaves them
GRAPH = "CUDA graph"  # forward, backward and optimizer
ROUND = "rounds"  # of `sync: {every: …}`
PARTS = (DATA, FORWARD, BACKWARD, BOTH, GRAPH, COMMUNICATION, ROUND, OPTIMIZER, LOGGING, OTHER)

Times = Mapping[str, float]  # seconds of a step by part
_UNEVEN = 1.15  # times the median: a mean above this is mentioned


@dataclass(frozen=True)
class PartTime:
    """Seconds in a step: the median over ranks, and that of the slowest rank."""

    median: float
    largest: float


@dataclass(frozen=True)
class StepReport:
    step: float  # seconds, median over steps and ranks
    mean: float
    parts: Mapping[str, PartTime]

    @property
    def residue(self) -> float:
        """Seconds of the step that the medians of parts do not add up to; negative if they are more."""
        return self.step - sum(part.median for part in self.parts.values())

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Times]]) -> StepReport:
        """`ranks`: the steps of each rank."""
        evened = [spread(steps) for steps in ranks]
        totals = [median(map(total, steps)) for steps in evened]
        parts: dict[str, PartTime] = {}
        for part in PARTS:
            if any(part in step for steps in evened for step in steps):
                each = [median(step.get(part, 0.0) for step in steps) for steps in evened]
                parts[part] = PartTime(median(each), max(each))
        return cls(median(totals), fmean(fmean(map(total, steps)) for steps in ranks), parts)

    def rows(self, *, several: bool) -> list[list[str]]:
        """A table. `several`: whether there are several ranks to compare."""
        rows = [["part", "ms", "%", *["slowest rank"] * several]]
        for name, part in self.parts.items():
            rows.append([name, *self._share(part.median), *[f"{part.largest * 1e3:.2f} ms"] * several])
        last = {"residue of medians": self.residue, "step": self.step}
        return rows + [[name, *self._share(seconds), *[""] * several] for name, seconds in last.items()]

    def _share(self, seconds: float) -> list[str]:
        return [f"{seconds * 1e3:.2f}", f"{100 * seconds / self.step:.1f}"]

    def notes(self, strategy: str, *, several: bool, separate: bool) -> list[str]:
        """What a reader of the table should know. `separate`: whether communication is not part of the computation."""
        found = []
        if several and separate:
            found.append("communication: what the step waits for after its last gradient, slower ranks included")
        elif several:
            found.append(f"communication of {strategy} is inside forward and backward, and can't be separated")
        if self.mean > _UNEVEN * self.step:
            found.append(f"steps are uneven: their mean is {self.mean * 1e3:.2f} ms")
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "residue": self.residue}


def total(step: Times) -> float:
    return sum(step.values())


def spread(steps: Sequence[Times]) -> list[dict[str, float]]:
    """The steps, each with an equal share of what does not happen in every one."""
    found = [dict(step) for step in steps]
    for part in (LOGGING, ROUND):
        if share := fmean(step.get(part, 0.0) for step in steps):
            found = [{**step, part: share} for step in found]
    return found


def step_page(title: str, about: str, report: StepReport, rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    bar = time_bar("Parts of a step", {name: max(0.0, part.median) for name, part in report.parts.items()})
    return page(title, [paragraph(about), bar, table(rows), *map(paragraph, notes)])
