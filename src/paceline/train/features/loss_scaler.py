"""The loss scale of fp16: the scaler takes the step, and skips those that overflow."""

from __future__ import annotations

from torch import Tensor

from paceline.checkpoint.state import OptionalState, StateEntry
from paceline.optim.clip import StepGradients
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks


def build(context: FeatureContext) -> Hooks | None:
    scaler, optimizer = context.bound.scaler, context.bound.optimizer
    state = [StateEntry("scaler", OptionalState(scaler))]
    if not scaler.is_enabled():
        return Hooks(name="loss_scaler", state=state)

    def unscale(_: StepGradients) -> None:
        scaler.unscale_(optimizer)

    def take_step() -> Tensor | None:
        scaler.step(optimizer)  # unscales, if nothing has looked at the gradients
        scaler.update()
        return scaler.overflowed

    if context.bound.held is not None:  # ranks see their shards only, and agree on overflows where they unscale
        return Hooks(name="loss_scaler", on_gradients=unscale, take_step=take_step, state=state)
    return Hooks(name="loss_scaler", unscale=unscale, take_step=take_step, state=state)
