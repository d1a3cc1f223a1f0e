"""Asynchronous successive halving: which trial continues.

Each trial trains to the first rung and is paused there, with a checkpoint. Of the trials that have reached a rung, the
best 1/eta continue to the next one, from their checkpoints. No place waits for the slowest trial of a rung: then the
best 1/eta of those that have reached it so far continue, of which a later trial may displace some.

Where the number of trials is the only limit, all trials take the first rung before any continues, and low rungs come
first: promotions that a later trial would displace cost steps. Where time or steps are limited, high rungs come first,
so that some trials reach the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.search.trial import Trial


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
