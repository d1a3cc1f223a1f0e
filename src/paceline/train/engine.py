"""Model, optimizer and step of this rank: the parts that the Trainer and custom loops share. `build_engine.py` builds
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from paceline.config.recipe import Config
from paceline.data.batches import to_device
from paceline.models.model_call import infer_call
from paceline.parallel.parallelize import change_recompute
from paceline.plan.layout import AXIS_NAMES
from paceline.plan.passes import require_allowed
from paceline.train.features.nonfinite import bad_step_test
from paceline.train.random_numbers import seed_generators
from paceline.train.sliced_step import refuse_forward

if TYPE_CHECKING:
    from paceline.data.loader import MicroBatch
    from paceline.log import Log
    from paceline.parallel.model_parts import ModelParts
    from paceline.plan.layout import LayoutPlan
    from paceline.run.history import Record
    from paceline.runtime.mesh import Mesh
    from paceline.runtime.noise import NoiseContext
    from paceline.runtime.process_group import World
    from paceline.train.checkpointing.run_handle import TrainProgress
    from paceline.train.checks.run_setup import RunSetup
    from paceline.train.features.context import FeatureContext
    from paceline.train.held_params import BoundOptimizer
    from paceline.train.hooks import HookTable
    from paceline.train.optimizer_update import OptimizerUpdate
    from paceline.train.telemetry import Telemetry
    from paceline.train.train_step import TrainStep
    from paceline.train.trainer_kwargs import UserObjects


@dataclass
class Engine:
    """The model, its optimizer and the training step on this rank."""

    config: Config
    user: UserObjects
    world: World
    log: Log
    mesh: Mesh
    layout: LayoutPlan
    parts: ModelParts
    bound: BoundOptimizer
    features: FeatureContext  # what they are built from
    hooks: HookTable  # what they do
    draw: NoiseContext
    stepper: TrainStep
    updater: OptimizerUpdate
    telemetry: Telemetry
    setup: RunSetup
    position: TrainProgress

    def seed_drawing(self, step: int) -> None:
        seed_generators(self.config, self.parts.model, self.mesh, step)

    def layout_facts(self) -> dict[str, Any]:
        """The layout of this run, for the manifest of a checkpoint."""
        degrees = {name: self.mesh.degrees.of(name) for name in AXIS_NAMES}
        return {"ranks": self.world.size, **degrees, "precision": self.config.precision}

    def is_bad(self, record: Record) -> bool:
        """Whether this is a step that `nonfinite` is about."""
        return bad_step_test(self.config.nonfinite, scaled=self.bound.scaler.is_enabled())(record)

    @property
    def warn(self) -> Callable[[str], None]:
        """Say that a forward depends on how a batch is cut."""
        return refuse_forward if self.config.fixed_order else self.log.warning

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
        if self.parts.module.call is not None:
            return on_device
        first = next(on_device, None)
        if first is None:
            return on_device
        self.choose_call(first.batch)
        return chain([first], on_device)  # not a generator, which would cost time in every step

    def choose_call(self, batch: Any) -> None:
        self.parts.module.call = infer_call(self.parts.model, batch, self.user.loss_fn, self.user.criterion)
        self.log.info(f"loss: {self.parts.module.call.rule}")

    def after_user_code(self) -> None:
        """Call after callbacks and evaluations, which may have run a backward or changed the optimizer."""
        self.updater.discard_gradients()
        self.follow_optimizer()
        if self.hooks.captured is not None:
            self.hooks.captured.after_user_code()

    def follow_optimizer(self) -> None:
        """Take over parameter groups that were added to the optimizer, and learning rates that have no effect."""
        if len(self.bound.optimizer.param_groups) != len(self.bound.names):
            self.bound.adopt_groups(self.parts, self.log)
            self.updater.refresh_parameters()
        self.features.schedule.warn_if_set(self.log.warning)

    def recompute(self, kind: str) -> None:
        """Change activation checkpointing of the wrapped model."""
        config = Config.from_dict({**self.config.to_dict(), "recompute": kind})
        require_allowed(config, self.layout)
        with self.draw.uninstalled():
            change_recompute(self.parts, config, self.log)
        self.config = config
