"""Callbacks: an object with some of eight methods, each of which gets a small record.

    class Losses:
        def on_log(self, record):            # at log points: plain numbers, equal on every rank
            print(record["step"], record["loss"])

    paceline.Trainer(model, callbacks=[Losses()])

| method       | when                              | record                                                    |
|--------------|-----------------------------------|-----------------------------------------------------------|
| on_start     | before the first step             | `Start`: the step done so far, the run folder             |
| on_step      | after every optimizer step        | `Step`: the loss is a tensor, so nobody pays for waiting  |
| on_log       | at log points                     | a dict: step, epoch, loss, lr, …                          |
| on_epoch     | after an epoch                    | `Epoch`                                                   |
| on_evaluate  | after an evaluation               | a dict: step, epoch, loss, metrics                        |
| on_save      | after a checkpoint                | `Saved`: step and folder                                  |
| on_error     | when an exception ends training   | `Failed`: step and exception                              |
| on_end       | at the end                        | `End`: the last step, and why it ended                    |

They run on every rank. One that has `state_dict` and `load_state_dict` as well goes into checkpoints and comes back
(rank 0's, for all). A plain function is an `on_step`. A hook that nobody has costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import TrainError, did_you_mean

HOOKS = ("on_start", "on_step", "on_log", "on_epoch", "on_evaluate", "on_save", "on_error", "on_end")


@dataclass(frozen=True, slots=True)
class Start:
    step: int
    run: str | None


@dataclass(slots=True)
class Step:
    """A finished optimizer step. Tensors are on the device: reading one waits for it."""

    step: int
    epoch: int
    lr: float
    samples: int  # over all ranks
    grad_norm: Tensor | None
    parts: list[tuple[Tensor, Any]]  # (mean, samples) or (sum, weight) of this rank's micro-batches
    means: bool

    @property
    def loss(self) -> Tensor:
        """This rank's mean loss in this step."""
        if len(self.parts) == 1 and self.means:
            return self.parts[0][0]
        total = torch.stack([value * weight if self.means else value for value, weight in self.parts]).sum()
        mean: Tensor = total / sum(weight for _, weight in self.parts)
        return mean


@dataclass(frozen=True, slots=True)
class Epoch:
    epoch: int  # the one that ended, counted from 0
    step: int


@dataclass(frozen=True, slots=True)
class Saved:
    step: int
    folder: str


@dataclass(frozen=True, slots=True)
class Failed:
    step: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class End:
    step: int
    reason: str


class Callbacks:
    """For each hook, the functions that want it."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        hooks: dict[str, list[Callable[[Any], Any]]] = {name: [] for name in HOOKS}
        for callback in callbacks:
            for name, function in _hooks_of(callback).items():
                hooks[name].append(function)
        self.hooks = hooks
        self._stateful = [
            each for each in callbacks if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")
        ]

    def state_dict(self) -> list[Any]:
        """The states of the callbacks that have one."""
        return [callback.state_dict() for callback in self._stateful]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """In the order in which they were given; a callback that is new keeps its own."""
        for callback, state in zip(self._stateful, states, strict=False):
            callback.load_state_dict(state)

    def call(self, hook: str, record: Any) -> None:
        for function in self.hooks[hook]:
            function(record)


def _hooks_of(callback: Any) -> dict[str, Callable[[Any], Any]]:
    names = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in names if name not in HOOKS]
    if unknown:
        raise TrainError(
            "unknown-hook",
            f"{type(callback).__name__} has a method {unknown[0]}, which is no hook.",
            fix=did_you_mean(unknown[0], HOOKS),
        )
    if not names and callable(callback) and not isinstance(callback, type):
        return {"on_step": callback}
    if not names:
        raise TrainError(
            "no-hook",
            f"The callback {callback!r} has none of the hooks.",
            fix=f"give an object (not a class) with some of {', '.join(HOOKS)}, or a function for on_step",
        )
    return {name: getattr(callback, name) for name in names}
