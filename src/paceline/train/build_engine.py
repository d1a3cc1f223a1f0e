"""Builds the engine of a rank in six phases. None of them knows a feature by name."""

from __future__ import annotations

from torch import nn

from paceline.config.recipe import Config
from paceline.parallel.model_parts import PassContext
from paceline.parallel.parallelize import parallelize
from paceline.train import recipe_objects
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.checks import layout_checks, wrapped_model
from paceline.train.checks.collective_order import check_order
from paceline.train.checks.foreign_steps import refuse_foreign_steps
from paceline.train.checks.run_setup import RunSetup
from paceline.train.engine import Engine
from paceline.train.features import compress, gradient_hooks, table
from paceline.train.features.context import FeatureContext
from paceline.train.held_params import bind_optimizer, optimizer_of_stages
from paceline.train.loss_weights import LossWeights
from paceline.train.optimizer_update import OptimizerUpdate
from paceline.train.random_numbers import noise_context
from paceline.train.sliced_step import SlicedStep
from paceline.train.telemetry import join
from paceline.train.train_step import TrainStep
from paceline.train.trainer_kwargs import DeviceLike, UserObjects


def build_engine(config: Config, model: nn.Module, user: UserObjects, device: DeviceLike) -> Engine:
    # 1. Join the other ranks.
    world, telemetry, log = join(config, user.notes, device)
    model, config, hook = wrapped_model.unwrap_model(model, config, world.size, log)
    hook = wrapped_model.choose_hook(user.comm_hook, hook, config)
    # 2. Refuse what is not supported.
    layout, partition = layout_checks.check_layout(config, model, user, hook, world, log)
    recipe_objects.set_torch_flags(config, world.device)
    mesh = layout_checks.build_mesh(config, layout, world)
    # 3. Apply the layout to the model.
    original_hooks = gradient_hooks.hooks_of(model)
    reduction = compress.choose_reduction(config, world, hook, log)
    recipe_objects.place_criterion(user.criterion, config, world.device)
    given = user.optimizer or optimizer_of_stages(config, model, mesh.degrees)
    context = PassContext(config, mesh, log, user.stateful_loss, partition, reduction.hook, reduction.traffic)
    parts = parallelize(model, context)
    reduction.begin(parts.module, config, log)
    check_order(parts.module, mesh, config)
    # 4. Bind the optimizer to what the layout has left on this rank.
    bound = bind_optimizer(parts, given, config, mesh, log, is_users=user.optimizer is not None)
    # 5. Build features.
    draw = noise_context(config, parts, mesh, user.loss_fn)
    features = table.gather(config, user, world, log, mesh, parts, bound, draw, original_hooks, reduction)
    stepper = _build_step(features)
    table.add_features(features)
    # 6. Build the step and the update.
    updater = OptimizerUpdate(bound, parts.module, features.table)
    if world.size > 1 or bound.held is not None:
        refuse_foreign_steps(bound.optimizer, updater)
    if config.graph:
        from paceline.train.graph_step import graphed_step  # few runs need it

        features.table.capture(graphed_step(features, stepper, updater))
    setup = RunSetup(
        parts.model, bound.optimizer, user.scheduler, user.loss_fn or user.criterion, owns_optimizer=not bound.is_users
    )
    engine = Engine(
        config, user, world, log, mesh, layout, parts, bound, features, features.table, draw, stepper, updater,
        telemetry, setup, TrainProgress(),
    )  # fmt: skip
    engine.seed_drawing(0)
    return engine


def _build_step(features: FeatureContext) -> TrainStep:
    config, mesh, parts, scaler = features.config, features.mesh, features.parts, features.bound.scaler
    weights = LossWeights(
        parts.module, mesh, features.table, parts.forward,
        scaler=scaler, local_steps=features.local_steps, traffic=features.reduction.traffic,
        finds_total=config.fixed_order, splits=parts.runner is not None,
    )  # fmt: skip
    shared = parts, weights, features.draw, features.table
    if parts.runner is not None:
        from paceline.train.pipeline_step import PipelineStep  # few runs need it

        return PipelineStep(config.pipeline, features.log.info, scaler, parts.module, *shared)
    return SlicedStep(mesh, parts.module, *shared) if config.fixed_order else TrainStep(parts.module, *shared)
