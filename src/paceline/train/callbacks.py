"""Callbacks: objects with any of nine hooks, each of which receives a record.

    class Losses:
        def on_log(self, record):            # Python numbers, equal on every rank
            print(record["step"], record["loss"])

    paceline.Trainer(model, callbacks=[Losses()])

| method       | when                              | record                                                    |
|--------------|-----------------------------------|-----------------------------------------------------------|
| on_start     | before the first step             | `Start`: steps completed so far, the run folder           |
| on_gradients | before every optimizer step       | `Gradients`: reduced and unscaled, but not yet clipped    |
| on_step      | after every optimizer step        | `Step`: the loss is a tensor, so nothing synchronizes     |
| on_log       | at log points                     | a dict: step, epoch, loss, lr, …                          |
| on_epoch     | after an epoch                    | `Epoch`                                                   |
| on_evaluate  | after an evaluation               | a dict: step, epoch, loss, metrics                        |
| on_save      | after a checkpoint                | `Saved`: step and folder                                  |
| on_error     | when an exception ends training   | `Failed`: step and exception                              |
| on_end       | at the end                        | `End`: the last step, and why training ended              |

Callbacks run on every rank. One with `state_dict` and `load_state_dict` is saved in checkpoints and restored (rank 0's
state, on every rank). A plain function is an `on_step` hook. Unused hooks cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.config.foreign_names import find_hint
from paceline.errors import TrainError, did_you_mean
from paceline.log import Log

HOOKS = ("on_start", "on_gradients", "on_step", "on_log", "on_epoch", "on_evaluate", "on_save", "on_error", "on_end")


@dataclass(frozen=True, slots=True)
class Start:
    step: int
    run: str | None


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a step by the name of their parameter, to be read, or changed in place. Under `fsdp` and with a
    tensor or pipeline axis, those of this rank's shards."""

    step: int
    gradients: dict[str, Tensor]


@dataclass(slots=True)
class Step:
    """A finished optimizer step. Tensors are on the device: reading a value synchronizes."""

    step: int
    epoch: int
    lr: float
    samples: int  # over all ranks
    grad_norm: Tensor | None
    parts: list[tuple[Tensor, Any]]  # (mean, samples) or (sum, weight) of this rank's micro-batches
    means: bool

    @property
    def loss(self) -> Tensor:
        """Mean loss of this rank in this step."""
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
    """The functions of each hook."""

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
        return [callback.state_dict() for callback in self._stateful]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """States are matched by position; a callback that was added later keeps its own."""
        for callback, state in zip(self._stateful, states, strict=False):
            callback.load_state_dict(state)

    def call(self, hook: str, record: Any) -> None:
        for function in self.hooks[hook]:
            function(record)

    def report(self, failure: Failed, log: Log) -> None:
        """Call on_error, whose own failure must not hide the first one."""
        try:
            self.call("on_error", failure)
        except Exception as second:
            log.warning(f"on_error of a callback failed: {type(second).__name__}: {second}")


def _hooks_of(callback: Any) -> dict[str, Callable[[Any], Any]]:
    names = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in names if name not in HOOKS]
    if unknown:
        raise TrainError(
            "unknown-hook",
            f"{type(callback).__name__} has an unknown hook: {unknown[0]}.",
            fix=f"use {hint}" if (hint := find_hint("hooks", unknown[0])) else did_you_mean(unknown[0], HOOKS),
        )
    if not names and callable(callback) and not isinstance(callback, type):
        return {"on_step": callback}
    if not names:
        raise TrainError(
            "no-hook",
            f"Callback {callback!r} has no hooks.",
            fix=f"pass an object (not a class) with any of {', '.join(HOOKS)}, or a function for on_step",
        )
    return {name: getattr(callback, name) for name in names}
