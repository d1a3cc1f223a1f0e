"""Model, optimizer and step of this rank: the parts that the Trainer and custom loops share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.config.components import OPTIMIZERS, PRECISIONS, OptimizerFacts
from paceline.config.recipe import Config
from paceline.data.batches import to_device
from paceline.data.loader import MicroBatch
from paceline.errors import TrainError
from paceline.log import rank_log
from paceline.models.loss_module import LossModule, parameters_of_loss
from paceline.models.model_call import infer_call
from paceline.models.spec import find_blocks
from paceline.models.weights import convert_state, input_change
from paceline.optim.optimizers import build_optimizer, fill_momentum
from paceline.parallel import parallelize
from paceline.parallel.dynamic_ddp import DynamicDDP
from paceline.parallel.fsdp import track_used
from paceline.parallel.optimizer_binding import bind, names_of
from paceline.parallel.pipeline.stage_partition import partition_model
from paceline.parallel.split import devices_of
from paceline.parallel.tensor.apply import check_plan
from paceline.plan.layout import AXIS_NAMES, derive_layout
from paceline.plan.network_model import Traffic
from paceline.plan.passes import is_sharded, require_allowed, uses_local_steps
from paceline.precision import policies
from paceline.precision.policies import Scaler
from paceline.runtime import collectives, consistency, process_group
from paceline.runtime.mesh import Mesh
from paceline.train import recipe_objects, resolve_layout, standstill, sync_setup
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.checks import foreign_steps, preflight, same_model, unsupported, wrapped_model
from paceline.train.checks.collective_order import check_order
from paceline.train.checks.run_setup import RunSetup
from paceline.train.checks.same_model import ReplicaCheck
from paceline.train.features import ema, gradient_hooks, local_steps, nonfinite, table
from paceline.train.features.context import FeatureContext
from paceline.train.features.schedule import LearningRate
from paceline.train.graph_step import GraphedStep
from paceline.train.hooks import Hooks, HookTable
from paceline.train.loss_weights import LossWeights
from paceline.train.optimizer_update import HeldParams, OptimizerUpdate
from paceline.train.pipeline_step import PipelineLossModule, PipelineStep, build_loss_module, require_no_loss_fn
from paceline.train.random_numbers import noise_context, seed_generators
from paceline.train.sliced_step import SlicedStep, refuse_forward
from paceline.train.telemetry import Telemetry
from paceline.train.throughput import ModelFlops, Throughput
from paceline.train.train_step import TrainStep
from paceline.train.user_objects import UserObjects

DeviceLike = str | int | torch.device | None


class Engine:
    """The model, its optimizer and the training step on this rank."""

    def __init__(self, config: Config, model: nn.Module, task: UserObjects, device: DeviceLike) -> None:
        self.config, self.task = config, task
        if config.strategy == "split":  # batches and losses are on its first device
            device = devices_of(config.split)[0]
        self.telemetry = Telemetry()
        self.world = process_group.init_world(
            device=device, backend=config.backend, timeout=config.timeout, fallback=config.fallback
        )
        self.log = rank_log(self.world.rank_info.rank, quiet=config.quiet)
        for note in task.notes:
            self.log.info(note)
        standstill.watch(self.world.size, self.telemetry.heartbeat)
        self.telemetry.joined(self.world)
        self.log.on_warning = self.telemetry.warned
        self.model, config, hook = wrapped_model.unwrap_model(model, config, self.world.size, self.log)
        self.config, self.comm_hook = config, wrapped_model.choose_hook(task.comm_hook, hook, config)
        unsupported.require_initialized(self.model)
        plan = derive_layout(config, self.world.size, self.world.rank_info.nodes)
        require_allowed(config, plan)
        if plan.degrees.tensor > 1:
            check_plan(self.model, config.tensor, plan.degrees.tensor)
        if plan.degrees.pipeline > 1:
            partition_model(self.model, config.pipeline, plan.degrees.pipeline)
        hook_name = {} if self.comm_hook is None else {"comm_hook": self.comm_hook.name}
        consistency.require_same_recipe(collectives.all_gather_object({**config.to_dict(), **hook_name}))
        same_model.require_same_model(self.model, task.optimizer, task.criterion)
        self.layout = resolve_layout.resolve(plan, config, self.model, self.world, task.optimizer)
        unsupported.require_supported(self.model, config, self.layout.degrees)
        if self.comm_hook is not None:
            wrapped_model.require_ddp(self.comm_hook, config, self.layout.degrees, self.log)
        recipe_objects.set_torch_flags(config, self.world.device)
        self.mesh = Mesh.build(
            self.layout.degrees,
            self.world,
            always=config.fsdp.offload,
            local_replicas=self.layout.degrees.replicate if uses_local_steps(config, self.layout.degrees) else 1,
        )
        unsupported.require_replicated_criterion(task.stateful_loss, config, self.layout.degrees)
        self._original_names, self._original_hooks = (
            names_of(self.named_parameters()),
            gradient_hooks.hooks_of(self.model),
        )
        if task.optimizer is not None:
            self._report_untrained(task.optimizer)
        self._block_names = [name for name, _ in find_blocks(self.model)]  # those of the recipe may differ by layout
        self.traffic = None if config.sync is None or self.world.size == 1 else Traffic()
        self.compression = sync_setup.compression_for(config, self.layout.degrees, self.traffic, self.log)
        if self.compression is not None:
            self.comm_hook = sync_setup.hook_for(self.compression, config)
        self._compose()
        self._build_optimizer()
        self._build_step()
        setup = (self.model, self.optimizer, task.scheduler, task.loss_fn or task.criterion)
        self.setup = RunSetup(*setup, owns_optimizer=self.owns_optimizer)
        self.seed_drawing(0)
        self.position = TrainProgress()
        self.checked = False

    def _compose(self) -> None:
        """Run the passes of the layout on the model and on the module that computes its loss."""
        config, task = self.config, self.task
        if isinstance(task.criterion, nn.Module):
            policies.prepare_model(task.criterion, config.precision)
            task.criterion.to(self.world.device)
        self._source_optimizer = task.optimizer
        if self.mesh.degrees.pipeline > 1:
            require_no_loss_fn(task.loss_fn)
            # Parameter groups are formed from the full model, before this rank keeps only its stages.
            self._source_optimizer = task.optimizer or build_optimizer(
                self.model, config.optimizer, config.optimizer.lr
            )
        self._composition = parallelize.PassContext(
            config,
            self.mesh,
            self.log,
            convert=partial(policies.prepare_model, precision=config.precision),
            autocast=partial(policies.forward_context, config.precision),
            gather_dtype=policies.half_dtype(config.precision),
            build_step=partial(build_loss_module, stateful_loss=self.task.stateful_loss),
            comm_hook=self.comm_hook,
            traffic=self.traffic,
        )
        self._subject = parallelize.ModelParts(self.model, config.blocks)
        self.wrapped = parallelize.parallelize(self._subject, self._composition)
        if self._subject.runner is not None:
            self._subject.runner.note_blocks(self._block_names)
        assert isinstance(self._subject.step, LossModule)
        self.module = self._subject.step
        self.module.proportions.warn = self.log.warning
        if self.compression is not None:
            sync_setup.begin(self.compression, self.module, config, self.log)
        check_order(self.module, self.mesh, config)
        partition, rank = self._subject.partition, self.mesh.coords["pipeline"]
        # Names of tied parameters that this rank holds a copy of → names of the originals, on another rank.
        self.tied_copies: Mapping[str, str] = {} if partition is None else partition.copies_on(rank)
        self._aliases: Mapping[str, str] = {} if partition is None else partition.aliases_on(rank)

    @property
    def ranks_have_state(self) -> bool:
        """Whether what reduces the gradients has a state of its own on each rank."""
        hook = self.comm_hook if self.world.size > 1 else None
        return hook is not None and (self.compression is not None or wrapped_model.is_saved(hook))

    def seed_drawing(self, step: int) -> None:
        seed_generators(self.config, self.model, self.mesh, step)

    def layout_facts(self) -> dict[str, Any]:
        """The layout of this run, for the manifest of a checkpoint."""
        degrees = {name: self.mesh.degrees.of(name) for name in AXIS_NAMES}
        return {"ranks": self.world.size, **degrees, "precision": self.config.precision}

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those of the model, and of a criterion that has some."""
        return [*self.model.named_parameters(), *parameters_of_loss(self.task.stateful_loss)]

    def _report_untrained(self, optimizer: torch.optim.Optimizer) -> None:
        if untrained := recipe_objects.check_parameters(dict(self.named_parameters()), optimizer):
            self.log.warning(recipe_objects.UNTRAINED.format(", ".join(untrained)))

    def _build_optimizer(self) -> None:
        """Called after the layout is applied: the optimizer holds the parameters of this rank."""
        config, source = self.config, self._source_optimizer
        self.owns_optimizer = self.task.optimizer is None
        self.optimizer = source or build_optimizer(self.model, config.optimizer, config.optimizer.lr)
        policies.prepare_optimizer(self.optimizer, config.precision)
        if config.channels_last:
            convert_state(self.optimizer)
        names = names_of(self.named_parameters()) if source is None else self._original_names
        if source is None and self.task.stateful_loss is not None:
            self._report_untrained(self.optimizer)
        self.optimizer_names = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        self.sharded: HeldParams | None = None
        if self.mesh.degrees.pipeline > 1:
            unsupported.require_separable(self.optimizer, self._registered_facts(), self.log)
        if is_sharded(config, self.layout.degrees):
            facts = self._registered_facts()
            local_names = {key: self._aliases.get(name, name) for key, name in names.items()}
            held = bind(self.optimizer, local_names, self.model, facts)
            allowed, copies = config.unused_parameters == "allow" or self.world.size == 1, frozenset(self.tied_copies)
            may_differ = allowed and self.world.size > 1 and isinstance(self.module, FSDPModule)
            used = track_used(self.module) if may_differ else None
            self.sharded = HeldParams(self.model, held, self.mesh, copies, allow_unused=allowed, used=used)
        fill_momentum(self.optimizer)
        self.scaler = Scaler(
            self.world.device,
            config.scaler,
            enabled=PRECISIONS.facts(config.precision).loss_scaling,
            reduce_max=None
            if self.sharded is None
            else partial(collectives.all_reduce, op="max", group=self.mesh.step_group),
        )
        if self.compression is not None and self.scaler.is_enabled():
            self.compression.scale = self.scaler.current

    def _registered_facts(self) -> OptimizerFacts | None:
        return OPTIMIZERS.facts(self.config.optimizer.name) if self.owns_optimizer else None

    def _warm_up(self, forward: Callable[[Any], Any], batch: Any) -> None:
        """Called before the first batch after DDP was rebuilt for other parameters."""
        self._report_untrained(self.optimizer)
        if self.checked:
            preflight.warm_up(self.model, forward, batch, self.draw, [self.task.criterion, self.task.loss_fn])

    def _build_step(self) -> None:
        config, device = self.config, self.world.device
        self.average = ema.average_of(self.model, config)
        self.draw = noise_context(config, self.model, self._block_names, self.mesh, self.wrapped, self.task.loss_fn)
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
        how = {"eager": not config.compile, "countable": not self.wrapped.slices}
        flops = ModelFlops(self.module, self.hooks, self.mesh, self.draw, user_code, **how)
        self.rates = Throughput(flops, self.mesh, self.log.warning, self.world.rank_info.local_world, self.traffic)
        if self.scaler.is_enabled():
            self.rates.loss_scale = self.scaler.current
        if self.rates.own_time is not None and device.type == "cuda" and isinstance(self.wrapped.forward, DynamicDDP):
            busy = self.rates.own_time
            self.hooks.set(Hooks(name="stragglers", before_backward=busy.arrived, after_backward=busy.left))
        scheduled = (config, self.optimizer, self.task.scheduler, self.hooks)
        self.schedule = LearningRate(*scheduled, owned=self.owns_optimizer, apart=self.local_steps is not None)
        given = (config, self.task, self.world, self.log, self.model, self.module, self.wrapped.forward)
        made = (self.optimizer, self.sharded, self.scaler, self.schedule, self.average)
        apart = (self.local_steps, self.replica_average, self.replicas)
        table.add_features(FeatureContext(*given, self._original_hooks, self.tied_copies, *made, *apart, self.hooks))
        self._build_updater()

    def _choose_step(self) -> TrainStep:
        config, forward = self.config, self.wrapped.forward
        pipeline = self.module if isinstance(self.module, PipelineLossModule) else None
        shared: dict[str, Any] = {"scaler": self.scaler, "local_steps": self.local_steps, "traffic": self.traffic}
        shared |= {"finds_total": config.fixed_order, "splits": pipeline is not None}
        weights = LossWeights(self.module, self.mesh, self.hooks, forward, **shared)
        parts = self.wrapped, weights, self.draw, self.hooks
        if pipeline is not None:
            return PipelineStep(config.pipeline, self.log.info, self.scaler, pipeline, *parts)
        return SlicedStep(self.mesh, self.module, *parts) if config.fixed_order else TrainStep(self.module, *parts)

    def _build_updater(self) -> None:
        config = self.config
        self.updater = OptimizerUpdate(self.optimizer, self.module, self.sharded, self.hooks)
        if isinstance(self.wrapped.forward, DynamicDDP):
            self.wrapped.forward.warm_up = self._warm_up
        if self.world.size > 1 or self.sharded is not None:
            foreign_steps.refuse_foreign_steps(self.optimizer, self.updater)
        self.graphed: GraphedStep | None = None
        if config.graph:
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
        cast = policies.input_cast(self.config.precision)
        change = input_change(cast, channels_last=self.config.channels_last)
        return to_device(micros, self.world.device, change)

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
        groups = self.optimizer.param_groups
        if len(groups) != len(self.optimizer_names):
            self._adopt_groups()
        self.schedule.warn_if_set(self.log.warning)

    def _adopt_groups(self) -> None:
        if self.sharded is not None:
            raise TrainError(
                "param-group-added",
                f"{type(self.optimizer).__name__}.add_param_group() was called after the Trainer was created.",
                why="the optimizer holds the shards of the parameters it had then",
                fix="create the optimizer with all its groups: freeze parameters with requires_grad_(False), or give "
                "them lr 0 until they are trained",
            )
        self._report_untrained(self.optimizer)
        names = names_of(self.named_parameters())
        self.optimizer_names = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        fill_momentum(self.optimizer)
        self.updater.refresh_parameters()

    def recompute(self, kind: str) -> None:
        """Change activation checkpointing of the wrapped model."""
        config = Config.from_dict({**self.config.to_dict(), "recompute": kind})
        require_allowed(config, self.layout)
        self._composition = replace(self._composition, config=config)
        with self.draw.uninstalled():
            parallelize.change_recompute(self._subject, self._composition)
        self.config = config
