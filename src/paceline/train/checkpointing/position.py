"""How far a run has come: what a checkpoint has to know of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class TrainProgress:
    """How far a run has come."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    evaluated: int = 0  # the step after which an evaluation was last made that was due
    epochs_ended: int = 0  # epochs whose end was attended to

    def state_dict(self) -> dict[str, int]:
        """Without step and epoch, which the manifest has itself."""
        return {"evaluated": self.evaluated, "epochs_ended": self.epochs_ended}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.evaluated, self.epochs_ended = state["evaluated"], state["epochs_ended"]

    def reset(self) -> None:
        """To the beginning."""
        self.step = self.epoch = self.evaluated = self.epochs_ended = 0
