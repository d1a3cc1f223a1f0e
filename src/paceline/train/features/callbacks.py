"""`on_gradients` of callbacks."""

from __future__ import annotations

from paceline.optim.clip import StepGradients
from paceline.parallel.shards import local_shard
from paceline.train.callbacks import Gradients
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks


def build(context: FeatureContext) -> Hooks | None:
    callbacks, model, held = context.user.callbacks, context.parts.model, context.bound.held
    if not callbacks.hooks["on_gradients"]:
        return None

    def call(gradients: StepGradients) -> None:
        found = {name: p.grad if held is None else held.held_of(p).grad for name, p in model.named_parameters()}
        named = {name: local_shard(gradient) for name, gradient in found.items() if gradient is not None}
        callbacks.call("on_gradients", Gradients(gradients.step + 1, named))

    return Hooks(name="callbacks", on_gradients=call)
