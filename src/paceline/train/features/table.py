"""The features of training, in the order in which those with the same slot are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.parallel.dynamic_ddp import DynamicDDP
from paceline.parallel.model_parts import ModelParts
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.runtime.process_group import World
from paceline.train.checks import preflight, unsupported
from paceline.train.checks.same_model import ReplicaCheck
from paceline.train.features import (
    callbacks,
    clip,
    compress,
    ema,
    gradient_hooks,
    local_steps,
    loss_scaler,
    nonfinite,
    power_iterations,
    schedule,
    unused_parameters,
)
from paceline.train.features.compress import Reduction
from paceline.train.features.context import Build, FeatureContext
from paceline.train.held_params import BoundOptimizer
from paceline.train.hooks import Hooks, HookTable
from paceline.train.throughput import ModelFlops, Throughput
from paceline.train.trainer_kwargs import UserObjects


def _stragglers(context: FeatureContext) -> Hooks | None:
    busy, is_ddp = context.rates.own_time, isinstance(context.parts.forward, DynamicDDP)
    if busy is None or not is_ddp or context.mesh.device.type != "cuda":
        return None
    return Hooks(name="stragglers", before_backward=busy.arrived, after_backward=busy.left)


FEATURES: tuple[Build, ...] = (
    _stragglers,
    power_iterations.build,
    compress.build,
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
    if isinstance(context.parts.forward, DynamicDDP):
        context.parts.forward.warm_up = partial(_warm_up, context)


def _warm_up(context: FeatureContext, forward: Callable[[Any], Any], batch: Any) -> None:
    """Called before the first batch after DDP was rebuilt for other parameters."""
    parts, user = context.parts, context.user
    unsupported.check_parameters(parts.named_parameters(), context.bound.optimizer, context.log)
    if parts.checked:
        preflight.warm_up(parts.model, forward, batch, context.draw, [user.criterion, user.loss_fn])


def gather(
    config: Config,
    user: UserObjects,
    world: World,
    log: Log,
    mesh: Mesh,
    parts: ModelParts,
    bound: BoundOptimizer,
    draw: NoiseContext,
    original_hooks: Mapping[str, Any],
    reduction: Reduction,
) -> FeatureContext:
    """What features are built from, with parts that several of them share."""
    average = ema.average_of(parts.model, config)
    steps = local_steps.build_local_steps(config, parts.module, mesh, log, reduction.traffic)
    replica_average = None if steps is None else local_steps.ReplicaAverage(steps, parts.model, mesh)
    replicas = None
    if config.preflight and mesh.degrees.replicate > 1:
        replicas = ReplicaCheck(parts.model, mesh, partial(local_steps.replicas_differ, steps))
    table = HookTable()
    how = {"eager": not config.compile, "countable": not parts.slices}
    flops = ModelFlops(parts.module, table, mesh, draw, [user.criterion, user.loss_fn], **how)
    loss_scale = bound.scaler.current if bound.scaler.is_enabled() else None
    local_ranks = world.rank_info.local_world
    rates = Throughput(flops, mesh, log.warning, local_ranks, reduction.traffic, loss_scale)
    scheduled = schedule.LearningRate(config, bound, user.scheduler, table, apart=steps is not None)
    made = (scheduled, average, steps, replica_average, replicas, rates, table)
    return FeatureContext(config, user, world, log, mesh, parts, bound, draw, original_hooks, reduction, *made)
