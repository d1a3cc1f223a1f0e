"""The features of training, in the order in which those with the same slot are called."""

from __future__ import annotations

from paceline.train.features import (
    callbacks,
    clip,
    ema,
    gradient_hooks,
    local_steps,
    loss_scaler,
    nonfinite,
    power_iterations,
    schedule,
    unused_parameters,
)
from paceline.train.features.context import Build, FeatureContext

FEATURES: tuple[Build, ...] = (
    power_iterations.build,
    unused_parameters.build,
    local_steps.build,  # a round, before the average follows the weights
    ema.build,
    loss_scaler.build,
    gradient_hooks.build,
    callbacks.build,
    nonfinite.build_buffers,
    nonfinite.build,  # of what hooks and callbacks made, before clipping hides it
    clip.build,
    schedule.build,
)


def add_features(context: FeatureContext) -> None:
    """Add those that this run uses to its table. Called on every rank."""
    for build in FEATURES:
        if (hooks := build(context)) is not None:
            context.table.set(hooks)
