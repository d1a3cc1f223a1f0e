"""How far a run has come: what a checkpoint has to know of the loop."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    """How far a run has come."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    evaluated: int = 0  # the step after which an evaluation was last made that was due
    epochs_ended: int = 0  # epochs whose end was attended to
    was_loaded: bool = False  # from a checkpoint, after which no step was taken yet
