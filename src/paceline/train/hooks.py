"""What features of training do at each point of a step.

A feature is a record of functions, `Hooks`. The step calls those of each slot in a loop over a tuple, which is empty
for most slots: a feature that is not used costs nothing, and no class of the step knows one by name. Features that come
and go while training (counting FLOPs, `paceline bench step`) change the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from paceline.data.loader import MicroBatch

Losses = Sequence[tuple[Tensor, Any]]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Of one feature. Called on every rank, except `before_backward`, which only ranks with a loss call."""

    name: str
    before_micro: Callable[[MicroBatch], None] | None = None  # a micro-batch of the Trainer begins
    before_forward: Callable[[bool], None] | None = None  # of training, with whether it is the first of its step
    before_backward: Callable[[MicroBatch, Tensor], None] | None = None  # with the value that it starts from
    after_backward: Callable[[MicroBatch], None] | None = None  # in a pipeline, after its schedule
    on_losses: Callable[[Losses], None] | None = None  # after the last backward of a step
    on_reduced: Callable[[int], None] | None = None  # gradients are reduced; not called for captured steps
    after_step: Callable[[int], None] | None = None  # with the number of steps so far


SLOTS = tuple(field.name for field in fields(Hooks) if field.name != "name")


class HookTable:
    """The functions of all features, as a tuple for each slot, in the order in which the features were added."""

    def __init__(self) -> None:
        self._features: dict[str, Hooks] = {}
        self._bind()

    def set(self, hooks: Hooks) -> None:
        """Add those of a feature, or replace them (by none), which keeps its place."""
        self._features[hooks.name] = hooks
        self._bind()

    def _bind(self) -> None:
        def of(slot: str) -> tuple[Any, ...]:
            return tuple(hook for each in self._features.values() if (hook := getattr(each, slot)) is not None)

        self.before_micro, self.before_forward = of("before_micro"), of("before_forward")
        self.before_backward, self.after_backward = of("before_backward"), of("after_backward")
        self.on_losses, self.on_reduced, self.after_step = of("on_losses"), of("on_reduced"), of("after_step")
