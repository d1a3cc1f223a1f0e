"""A trial of a study, as plain data; and which one continues under asynchronous successive halving.

Each trial trains to the first rung and is paused there, with a checkpoint. Of the trials that have reached a rung, the
best 1/eta continue to the next one, from their checkpoints. No place waits for the slowest trial of a rung: then the
best 1/eta of those that have reached it so far continue, of which a later trial may displace some.

Where the number of trials is the only limit, all trials take the first rung before any continues, and low rungs come
first: promotions that a later trial would displace cost steps. Where time or steps are limited, high rungs come first,
so that some trials reach the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def rung_fraction(rung: int, rungs: int, eta: int) -> float | None:
    """The part of its training after which a trial has reached a rung; None for the last one, which is the end."""
    return None if rung >= rungs - 1 else float(eta) ** (rung - (rungs - 1))


def next_promotion(
    trials: Sequence[Trial], rungs: int, eta: int, *, minimizes: bool, is_last: bool, high_first: bool
) -> Trial | None:
    """The trial to continue, of those that are paused. `is_last`: no trial will reach a first rung any more, so the
    best one continues even if fewer than eta have reached its rung."""
    for rung in reversed(range(rungs - 1)) if high_first else range(rungs - 1):
        reached = [each for each in trials if rung in each.rung_values and each.state != "failed"]
        places = len(reached) // eta
        if is_last and reached:
            places = max(1, places)
        ranked = sorted(reached, key=lambda each: (each.rung_values[rung] * (1 if minimizes else -1), each.number))
        found = next((each for each in ranked[:places] if each.state == "paused" and each.rung == rung), None)
        if found is not None:
            return found
    return None
