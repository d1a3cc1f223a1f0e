"""What features of training do at each point of a step.

A feature is a function that returns a record of functions, `Hooks`. The step calls those of each slot in a loop over a
tuple, which is empty for most of them: a feature that is not used costs nothing, and no class of the step knows one by
name. Features that come and go while training (counting FLOPs, `paceline bench step`) change the table.

| slot | when | on |
|---|---|---|
| `before_micro` | a micro-batch of the Trainer begins | every rank |
| `before_forward` | before each forward of training, with whether it is the first one of its step | every rank |
| `before_backward` | before autograd runs, with the value that it starts from | ranks that compute a loss |
| `after_backward` | after autograd; after the schedule of a pipeline | every rank |
| `on_losses` | after the last backward of a step, with its losses; not on the host of a captured step | every rank |
| `on_reduced` | the gradients of a step are reduced, and the update begins | every rank |
| `after_step` | the step is complete, with the number of steps so far | every rank |
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
    """Of one feature."""

    name: str
    before_micro: Callable[[MicroBatch], None] | None = None
    before_forward: Callable[[bool], None] | None = None
    before_backward: Callable[[MicroBatch, Tensor], None] | None = None
    after_backward: Callable[[MicroBatch], None] | None = None
    on_losses: Callable[[Losses], None] | None = None
    on_reduced: Callable[[int], None] | None = None
    after_step: Callable[[int], None] | None = None


SLOTS = tuple(field.name for field in fields(Hooks) if field.name != "name")


class HookTable:
    """The hooks of all features, by slot, in the order in which the features were added."""

    before_micro: tuple[Callable[[MicroBatch], None], ...]
    before_forward: tuple[Callable[[bool], None], ...]
    before_backward: tuple[Callable[[MicroBatch, Tensor], None], ...]
    after_backward: tuple[Callable[[MicroBatch], None], ...]
    on_losses: tuple[Callable[[Losses], None], ...]
    on_reduced: tuple[Callable[[int], None], ...]
    after_step: tuple[Callable[[int], None], ...]

    def __init__(self) -> None:
        self._features: dict[str, Hooks] = {}
        self._bind()

    def set(self, hooks: Hooks) -> None:
        """Add those of a feature, or replace them, which keeps its place."""
        self._features[hooks.name] = hooks
        self._bind()

    def remove(self, name: str) -> None:
        self._features.pop(name, None)
        self._bind()

    def _bind(self) -> None:
        for slot in SLOTS:
            found = (getattr(hooks, slot) for hooks in self._features.values())
            setattr(self, slot, tuple(hook for hook in found if hook is not None))
