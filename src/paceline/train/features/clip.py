"""`clip_norm` and `clip_value`."""

from __future__ import annotations

from paceline.optim.clip import StepGradients
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks


def build(context: FeatureContext) -> Hooks | None:
    norm, value = context.config.clip_norm, context.config.clip_value
    if norm is None and value is None:
        return None

    def clip(gradients: StepGradients) -> None:
        gradients.clip(norm, value)

    return Hooks(name="clip", on_gradients=clip)
