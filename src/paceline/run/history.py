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
    """Steps and evaluations of one `train()` call, and the run folder. Equal on every rank.

    Args:
        steps: a record for each log point: `step`, `epoch`, `loss`, `lr` and more
        evaluations: a record for each evaluation: `step`, `epoch`, `loss` and the metrics
        run: path of the run folder; its `metrics.jsonl` has the records of the whole run. None: nothing is written
        ended: why training ended: end of data, max_steps, early_stop, …
        metric: by which evaluations are compared: that of `save_best`
        mode: whether its `"min"` or its `"max"` is best

    Example:
        >>> import paceline
        >>> history = paceline.History([{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4}], [{"step": 2, "loss": 0.6}])
        >>> history.losses
        [0.5, 0.4]
        >>> history.best
        {'step': 2, 'loss': 0.6}
    """

    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    run: str | None = None
    ended: str | None = None
    metric: str = "loss"
    mode: str = "min"

    @property
    def losses(self) -> list[float]:
        """The loss of every step in `steps`."""
        return [float(record["loss"]) for record in self.steps]

    @property
    def best(self) -> Record | None:
        """The best evaluation by the metric of `save_best`; without it, the one with the lowest loss."""
        finite = [record for record in self.evaluations if math.isfinite(record.get(self.metric, math.nan))]
        choose = min if self.mode == "min" else max
        return choose(finite, key=lambda record: float(record[self.metric]), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON.

        Returns:
            A dict from which `from_json` makes an equal History.

        Example:
            >>> history.to_json()["evaluations"]
            [{'step': 2, 'loss': 0.6}]
        """
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> History:
        """The History of `to_json()`.

        Args:
            values: what `to_json()` returned

        Returns:
            An equal History.

        Example:
            >>> paceline.History.from_json(history.to_json()) == history
            True
        """
        return cls(**values)
