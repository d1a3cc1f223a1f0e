"""What features of training are built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.optim.ema import Ema
from paceline.parallel.model_parts import ModelParts
from paceline.parallel.sync.local_steps import LocalSteps
from paceline.runtime.mesh import Mesh
from paceline.runtime.noise import NoiseContext
from paceline.runtime.process_group import World
from paceline.train.checks.same_model import ReplicaCheck
from paceline.train.held_params import BoundOptimizer
from paceline.train.hooks import Hooks, HookTable
from paceline.train.throughput import Throughput
from paceline.train.trainer_kwargs import UserObjects

if TYPE_CHECKING:
    from paceline.train.features.compress import Reduction
    from paceline.train.features.local_steps import ReplicaAverage
    from paceline.train.features.schedule import LearningRate


@dataclass
class FeatureContext:
    config: Config
    user: UserObjects
    world: World
    log: Log
    mesh: Mesh
    parts: ModelParts
    bound: BoundOptimizer
    draw: NoiseContext
    original_hooks: Mapping[str, Any]  # of the parameters, before the layout was applied
    reduction: Reduction
    schedule: LearningRate
    average: Ema | None
    local_steps: LocalSteps | None
    replica_average: ReplicaAverage | None
    replicas: ReplicaCheck | None
    rates: Throughput
    table: HookTable  # features that come and go change their own row


Build = Callable[[FeatureContext], Hooks | None]  # None: not used in this run. Called on every rank
