"""Spectral norms improve their estimate once per step, in its first forward."""

from __future__ import annotations

from paceline.models.weights import PowerIterations
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks


def build(context: FeatureContext) -> Hooks | None:
    norms = PowerIterations(context.parts.model)
    return Hooks(name="power_iterations", before_forward=norms.allow) if norms else None
