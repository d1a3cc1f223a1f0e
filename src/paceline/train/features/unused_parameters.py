"""`unused_parameters: error` under DDP: every parameter gets a gradient in each step."""

from __future__ import annotations

from functools import partial

from paceline.parallel.dynamic_ddp import DynamicDDP
from paceline.train.checks.preflight import require_gradients
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks


def build(context: FeatureContext) -> Hooks | None:
    replicas, config = context.parts.forward, context.config
    if not isinstance(replicas, DynamicDDP) or config.unused_parameters != "error" or config.ddp.static_graph:
        return None
    return Hooks(name="unused_parameters", all_backwards=partial(require_gradients, context.parts.model, replicas))
