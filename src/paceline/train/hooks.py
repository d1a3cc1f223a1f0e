"""What features of training do at each point of a step.

A feature is a record of functions, `Hooks`. The step and the update call those of each slot in a loop over a tuple,
which is empty for most slots: a feature that is not used costs nothing, and no class of the step knows one by name.
Features that come and go while training (counting FLOPs, a save that is still copying, `paceline bench step`) change
the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.checkpoint.state import StateEntry
from paceline.data.loader import MicroBatch
from paceline.optim.clip import StepGradients

if TYPE_CHECKING:
    from paceline.train.graph_step import GraphedStep
    from paceline.train.weights_view import WeightsView

Losses = Sequence[tuple[Tensor, Any]]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Of one feature. Called on every rank, except `before_backward`, which only ranks with a loss call.

    Of a captured step (`graph: true`), those that are marked so run on the host, around each replay; the others are
    captured."""

    name: str
    begin: Callable[[int], None] | None = None  # host; before the first step, with its number of micro-batches
    before_micro: Callable[[MicroBatch], None] | None = None  # a micro-batch of the Trainer begins
    before_forward: Callable[[bool], None] | None = None  # of training, with whether it is the first of its step
    before_backward: Callable[[MicroBatch, Tensor], None] | None = None  # with the value that it starts from
    after_backward: Callable[[MicroBatch], None] | None = None  # in a pipeline, after its schedule
    # After the last backward of a step, before any other collective; a custom loop may call it twice. Not captured.
    all_backwards: Callable[[], None] | None = None
    on_losses: Callable[[Losses], None] | None = None  # after the last backward of a step
    on_reduced: Callable[[int], None] | None = None  # gradients are reduced, where the optimizer looks for them
    unscale: Callable[[StepGradients], None] | None = None  # before `on_gradients`, if a feature has that
    on_gradients: Callable[[StepGradients], None] | None = None  # after the factor of the step. Without autograd
    vetoes: Callable[[], bool] | None = None  # whether parameters stay as they are, known on the host
    before_update: Callable[[int], None] | None = None  # host; parameters change next. With the step, counted from 0
    take_step: Callable[[], Tensor | float | None] | None = None  # steps the optimizer (one feature at most); skipped?
    after_update: Callable[[int, bool], None] | None = None  # with the number of steps, and whether this one was taken
    end_of_update: Callable[[int, bool], None] | None = None  # host; the same, before the step is counted
    after_step: Callable[[int, bool], None] | None = None  # host; the same, when the step is counted
    values: Callable[[], Mapping[str, Any]] | None = None  # host; for the metrics, when the step is counted
    end: Callable[[], None] | None = None  # host; `train()` ends, and not because of a signal
    reset: Callable[[], None] | None = None  # a checkpoint was loaded, or a bad step was reported
    restart: Callable[[], None] | None = None  # training starts with loaded weights: state begins anew
    view: Callable[[WeightsView], WeightsView] | None = None  # what leaves the run
    state: Sequence[StateEntry] = ()  # what a checkpoint has of it


SLOTS = tuple(field.name for field in fields(Hooks) if field.name not in ("name", "state"))


class HookTable:
    """The functions of all features, as a tuple for each slot, in the order in which the features were added."""

    def __init__(self) -> None:
        self._features: dict[str, Hooks] = {}
        self.captured: GraphedStep | None = None  # what runs a step in place of the plain one
        self._bind()

    def capture(self, step: GraphedStep) -> None:
        self.captured = step

    def set(self, hooks: Hooks) -> None:
        """Add those of a feature, or replace them (by none), which keeps its place."""
        self._features[hooks.name] = hooks
        self._bind()

    def _bind(self) -> None:
        def of(slot: str) -> tuple[Any, ...]:
            return tuple(hook for each in self._features.values() if (hook := getattr(each, slot)) is not None)

        self.begin, self.before_micro, self.before_forward = of("begin"), of("before_micro"), of("before_forward")
        self.before_backward, self.after_backward = of("before_backward"), of("after_backward")
        self.all_backwards, self.on_losses, self.on_reduced = of("all_backwards"), of("on_losses"), of("on_reduced")
        self.unscale = of("unscale")
        on_gradients = of("on_gradients")
        self.on_gradients = (*self.unscale, *on_gradients) if on_gradients else ()
        self.vetoes, self.before_update, self.take_step = of("vetoes"), of("before_update"), of("take_step")
        self.end_of_update = of("end_of_update")
        self.after_update, self.after_step, self.reset = of("after_update"), of("after_step"), of("reset")
        self.values, self.end, self.restart, self.view = of("values"), of("end"), of("restart"), of("view")
        self.state = [entry for each in self._features.values() for entry in each.state]
