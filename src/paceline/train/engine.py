"""Model, optimizer and step of this rank: the parts that the Trainer and custom loops share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from paceline.config.components import PRECISIONS
from paceline.config.recipe import Config
from paceline.data.batches import to_device
from paceline.data.loader import MicroBatch
from paceline.models.loss_module import parameters_of_loss
from paceline.models.model_call import infer_call
from paceline.parallel.dynamic_ddp import DynamicDDP
from paceline.parallel.model_parts import PassContext
from paceline.parallel.parallelize import change_recompute, parallelize
from paceline.plan.layout import AXIS_NAMES
from paceline.plan.network_model import Traffic
from paceline.plan.passes import require_allowed, uses_local_steps
from paceline.precision import policies
from paceline.precision.policies import Scaler
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.train import recipe_objects
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.checks import foreign_steps, preflight, unsupported, wrapped_model
from paceline.train.checks.collective_order import check_order
from paceline.train.checks.layout_checks import check_layout
from paceline.train.checks.run_setup import RunSetup
from paceline.train.checks.same_model import ReplicaCheck
from paceline.train.features import ema, gradient_hooks, local_steps, nonfinite, table
from paceline.train.features.compress import choose_reduction
from paceline.train.features.context import FeatureContext
from paceline.train.features.schedule import LearningRate
from paceline.train.held_params import bind_optimizer, optimizer_of_stages
from paceline.train.hooks import Hooks, HookTable
from paceline.train.loss_weights import LossWeights
from paceline.train.optimizer_update import OptimizerUpdate
from paceline.train.random_numbers import noise_context, seed_generators
from paceline.train.sliced_step import SlicedStep, refuse_forward
from paceline.train.telemetry import join
from paceline.train.throughput import ModelFlops, Throughput
from paceline.train.train_step import TrainStep
from paceline.train.trainer_kwargs import DeviceLike, UserObjects

if TYPE_CHECKING:
    from paceline.train.graph_step import GraphedStep


class Engine:
    """The model, its optimizer and the training step on this rank."""

    def __init__(self, config: Config, model: nn.Module, task: UserObjects, device: DeviceLike) -> None:
        self.task = task
        self.world, self.telemetry, self.log = join(config, task.notes, device)
        self.model, config, hook = wrapped_model.unwrap_model(model, config, self.world.size, self.log)
        self.config, hook = config, wrapped_model.choose_hook(task.comm_hook, hook, config)
        self.layout, partition = check_layout(config, self.model, task, hook, self.world, self.log)
        recipe_objects.set_torch_flags(config, self.world.device)
        self.mesh = Mesh.build(
            self.layout.degrees,
            self.world,
            always=config.fsdp.offload,
            local_replicas=self.layout.degrees.replicate if uses_local_steps(config, self.layout.degrees) else 1,
        )
        self._original_hooks = gradient_hooks.hooks_of(self.model)
        if task.optimizer is not None:
            named = [*self.model.named_parameters(), *parameters_of_loss(task.stateful_loss)]
            unsupported.check_parameters(named, task.optimizer, self.log)
        self.traffic = None if config.sync is None or self.world.size == 1 else Traffic()
        self.reduction = choose_reduction(config, self.world, self.traffic, hook, self.log)
        hook = self.reduction.hook
        self._compose(PassContext(config, self.mesh, self.log, task.stateful_loss, partition, hook, self.traffic))
        self._build_step()
        setup = (self.model, self.bound.optimizer, task.scheduler, task.loss_fn or task.criterion)
        self.setup = RunSetup(*setup, owns_optimizer=not self.bound.is_users)
        self.seed_drawing(0)
        self.position = TrainProgress()
        self.checked = False

    def _compose(self, context: PassContext) -> None:
        """Run the passes of the layout on the model and on the module that computes its loss."""
        config, task = self.config, self.task
        if isinstance(task.criterion, nn.Module):
            policies.prepare_model(task.criterion, config.precision)
            task.criterion.to(self.world.device)
        given = task.optimizer or optimizer_of_stages(config, self.model, self.mesh.degrees)
        self.parts = parallelize(self.model, context)
        self.module = self.parts.module
        self.reduction.begin(self.module, config, self.log)
        check_order(self.module, self.mesh, config)
        is_users = task.optimizer is not None
        self.bound = bind_optimizer(self.parts, given, config, self.mesh, self.log, is_users=is_users)
        self._build_scaler()

    def seed_drawing(self, step: int) -> None:
        seed_generators(self.config, self.model, self.mesh, step)

    def layout_facts(self) -> dict[str, Any]:
        """The layout of this run, for the manifest of a checkpoint."""
        degrees = {name: self.mesh.degrees.of(name) for name in AXIS_NAMES}
        return {"ranks": self.world.size, **degrees, "precision": self.config.precision}

    def _build_scaler(self) -> None:
        config = self.config
        self.scaler = Scaler(
            self.world.device,
            config.scaler,
            enabled=PRECISIONS.facts(config.precision).loss_scaling,
            reduce_max=None
            if self.bound.held is None
            else partial(collectives.all_reduce, op="max", group=self.mesh.step_group),
        )
        self.reduction.follow(self.scaler)

    def _warm_up(self, forward: Callable[[Any], Any], batch: Any) -> None:
        """Called before the first batch after DDP was rebuilt for other parameters."""
        unsupported.check_parameters(self.parts.named_parameters(), self.bound.optimizer, self.log)
        if self.checked:
            preflight.warm_up(self.model, forward, batch, self.draw, [self.task.criterion, self.task.loss_fn])

    def _build_step(self) -> None:
        config, device = self.config, self.world.device
        self.average = ema.average_of(self.model, config)
        self.draw = noise_context(config, self.parts, self.mesh, self.task.loss_fn)
        self.is_bad = nonfinite.bad_step_test(config.nonfinite, scaled=self.scaler.is_enabled())
        self.local_steps = local_steps.build_local_steps(config, self.module, self.mesh, self.log, self.traffic)
        self.replica_average: local_steps.ReplicaAverage | None = None
        if self.local_steps is not None:
            self.replica_average = local_steps.ReplicaAverage(self.local_steps, self.model, self.mesh)
        checked = (self.model, self.mesh, partial(local_steps.replicas_differ, self.local_steps))
        self.replicas = ReplicaCheck(*checked) if config.preflight and self.mesh.degrees.replicate > 1 else None
        self.warn = refuse_forward if config.fixed_order else self.log.warning
        self.hooks = HookTable()
        self.stepper = self._choose_step()
        user_code = [self.task.criterion, self.task.loss_fn]
        how = {"eager": not config.compile, "countable": not self.parts.slices}
        flops = ModelFlops(self.module, self.hooks, self.mesh, self.draw, user_code, **how)
        self.rates = Throughput(flops, self.mesh, self.log.warning, self.world.rank_info.local_world, self.traffic)
        if self.scaler.is_enabled():
            self.rates.loss_scale = self.scaler.current
        if self.rates.own_time is not None and device.type == "cuda" and isinstance(self.parts.forward, DynamicDDP):
            busy = self.rates.own_time
            self.hooks.set(Hooks(name="stragglers", before_backward=busy.arrived, after_backward=busy.left))
        self.schedule = LearningRate(config, self.bound, self.task.scheduler, self.hooks, self.local_steps is not None)
        given = (config, self.task, self.world, self.log, self.parts, self.bound, self.scaler, self._original_hooks)
        made = (self.schedule, self.average, self.local_steps, self.replica_average, self.replicas, self.hooks)
        table.add_features(FeatureContext(*given, *made))
        self._build_updater()

    def _choose_step(self) -> TrainStep:
        config, forward = self.config, self.parts.forward
        shared: dict[str, Any] = {"scaler": self.scaler, "local_steps": self.local_steps, "traffic": self.traffic}
        shared |= {"finds_total": config.fixed_order, "splits": self.parts.runner is not None}
        weights = LossWeights(self.module, self.mesh, self.hooks, forward, **shared)
        parts = self.parts, weights, self.draw, self.hooks
        if self.parts.runner is not None:
            from paceline.train.pipeline_step import PipelineStep  # few runs need it

            return PipelineStep(config.pipeline, self.log.info, self.scaler, self.module, *parts)
        return SlicedStep(self.mesh, self.module, *parts) if config.fixed_order else TrainStep(self.module, *parts)

    def _build_updater(self) -> None:
        config = self.config
        self.updater = OptimizerUpdate(self.bound, self.module, self.hooks)
        if isinstance(self.parts.forward, DynamicDDP):
            self.parts.forward.warm_up = self._warm_up
        if self.world.size > 1 or self.bound.held is not None:
            foreign_steps.refuse_foreign_steps(self.bound.optimizer, self.updater)
        self.graphed: GraphedStep | None = None
        if config.graph:
            from paceline.train.graph_step import GraphedStep  # few runs need it

            parts = (self.module, self.stepper, self.updater, self.schedule, self.log)
            waits = config.nonfinite != "raise" or self.scaler.is_enabled()
            has_callback = bool(self.task.callbacks.hooks["on_gradients"])
            self.graphed = GraphedStep(*parts, waits=waits, has_callback=has_callback)

    @property
    def is_blocked(self) -> bool:
        """Whether a feature keeps the parameters as they are."""
        return any(veto() for veto in self.hooks.vetoes)

    def reset_features(self) -> None:
        """Call after a checkpoint was loaded, or a bad step was reported."""
        for reset in self.hooks.reset:
            reset()

    def on_device(self, micros: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        return to_device(micros, self.world.device, self.parts.inputs)

    def ready(self, micros: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Move micro-batches to the device. The first one determines how the model is called."""
        on_device = self.on_device(micros)
        if self.module.call is not None:
            return on_device
        first = next(on_device, None)
        if first is None:
            return on_device
        self.choose_call(first.batch)
        return chain([first], on_device)  # not a generator, which would cost time in every step

    def choose_call(self, batch: Any) -> None:
        self.module.call = infer_call(self.model, batch, self.task.loss_fn, self.task.criterion)
        self.log.info(f"loss: {self.module.call.rule}")

    def after_user_code(self) -> None:
        """Call after callbacks and evaluations, which may have run a backward or changed the optimizer."""
        self.updater.discard_gradients()
        self.follow_optimizer()
        if self.graphed is not None:
            self.graphed.after_user_code()

    def follow_optimizer(self) -> None:
        """Take over parameter groups that were added to the optimizer, and learning rates that have no effect."""
        if len(self.bound.optimizer.param_groups) != len(self.bound.names):
            self.bound.adopt_groups(self.parts, self.log)
            self.updater.refresh_parameters()
        self.schedule.warn_if_set(self.log.warning)

    def recompute(self, kind: str) -> None:
        """Change activation checkpointing of the wrapped model."""
        config = Config.from_dict({**self.config.to_dict(), "recompute": kind})
        require_allowed(config, self.layout)
        with self.draw.uninstalled():
            change_recompute(self.parts, config, self.log)
        self.config = config
