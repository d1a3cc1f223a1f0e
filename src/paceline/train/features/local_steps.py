"""Replicas that train apart (`sync.every`): the mean gradient in their warm-up, then a round every few steps."""

from __future__ import annotations

import torch

from paceline.parallel.shards import local_shard
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks


def build(context: FeatureContext) -> Hooks | None:
    steps, groups = context.local_steps, context.bound.optimizer.param_groups
    if steps is None:
        return None

    def on_reduced(step: int) -> None:
        steps.before_step(step)
        if not steps.is_synchronous(step):
            return
        parameters = [parameter for group in groups for parameter in group["params"]]
        # A parameter that only others have used gets a gradient too.
        reached = steps.any_replica([parameter.grad is not None for parameter in parameters])
        for parameter, used in zip(parameters, reached, strict=True):
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        steps.average_([local_shard(p.grad) for p in parameters if p.grad is not None])

    def after_update(step: int, stepped: bool) -> None:
        steps.after_step(step)  # a replica that takes no step joins the round of the others

    def restart() -> None:
        steps.load_state_dict({})

    return Hooks(name="local_steps", on_reduced=on_reduced, after_update=after_update, restart=restart)
