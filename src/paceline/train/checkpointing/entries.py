"""The state entries of a checkpoint.

    model/<name>                     weights and buffers
    ema/<name>                       EMA weights
    optimizer/<name>/<key>           optimizer state of a parameter: tensors
    optimizer-values/<name>/<key>    and plain numbers
    compression/…, comm-state/…      what reduces gradients (sync_state.py)
    random/rank-<r>/<generator>      random state of each rank
    outer/…, replicas/<r>/…          of replicas that train apart: see sync_state.py

To checkpoint another part, add a `StateEntry` to `training_state`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.checkpoint.export import PretrainedFiles, is_pretrained
from paceline.checkpoint.state import StateEntry, Stateful, TrainingState
from paceline.runtime import rng
from paceline.train.callbacks import Callbacks
from paceline.train.checkpointing.model_state import EmaState, ModelState
from paceline.train.checkpointing.optimizer_state import OptimizerState
from paceline.train.checkpointing.sync_state import (
    COMM_STATE,
    COMPRESSION,
    CompressionState,
    HookState,
    ReplicaScaler,
    RoundState,
    replica_place,
)
from paceline.train.engine import Engine
from paceline.train.evaluate import EvaluationPolicy
from paceline.train.features.schedule import LearningRate
from paceline.train.first_step import BucketSizeState
from paceline.train.weights_view import WeightsView


def training_state(
    engine: Engine, view: WeightsView, rates: LearningRate, policy: EvaluationPolicy, callbacks: Callbacks
) -> TrainingState:
    """All entries of a checkpoint. Weights come first, because other entries may depend on them."""
    entries = [
        StateEntry("model", ModelState(engine, view), scope="weights", volatile=False),
        StateEntry("ema", EmaState(engine), scope="weights", volatile=False),
        StateEntry("optimizer", OptimizerState(engine), volatile=False),
        StateEntry("scaler", OptionalState(engine.scaler)),
        StateEntry("plateau", OptionalState(rates.plateau)),
        StateEntry("scheduler", SchedulerState(rates)),
        StateEntry("position", engine.position),
        StateEntry("outcome", policy),
        StateEntry("callbacks", callbacks),
        StateEntry(COMPRESSION, CompressionState(engine)),
        StateEntry(COMM_STATE, HookState(engine)),
        StateEntry("random", RandomState(engine), per_rank=True),
    ]
    if (criterion := engine.task.stateful_loss) is not None:
        entries.append(StateEntry("criterion", CriterionState(criterion), if_absent="keep"))
    if engine.config.ddp.bucket_mb == "auto":
        entries.append(StateEntry("bucket_mb", BucketSizeState(engine), if_absent="keep"))
    if is_pretrained(engine.model):
        entries.append(StateEntry("huggingface", PretrainedFiles(engine.model), if_absent="keep"))
    place = None
    if engine.local_steps is not None:
        entries.append(StateEntry("outer", RoundState(engine, engine.local_steps), volatile=False))
        place = replica_place(engine)
        if engine.scaler.is_enabled():
            scaler = ReplicaScaler(engine.scaler)
            entries.append(StateEntry("replica-scaler", scaler, per_rank=True, if_absent="keep"))
    layout = engine.layout_facts()
    return TrainingState(entries, rank=engine.world.rank_info.rank, layout=layout, replica=place)


class CriterionState:
    """Parameters and buffers of a criterion, such as the center of DINO."""

    def __init__(self, criterion: nn.Module) -> None:
        self._criterion = criterion

    def state_dict(self) -> dict[str, Any]:
        return self._criterion.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._criterion.load_state_dict(state, strict=False)


class OptionalState:
    """A part that some runs do not have. It is saved as None, which leaves the part unchanged when loaded."""

    def __init__(self, part: Stateful | None) -> None:
        self._part = part

    def state_dict(self) -> Any:
        return None if self._part is None else self._part.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self._part is not None and state:
            self._part.load_state_dict(state)


class SchedulerState:
    """The state of the LR scheduler, without functions (LambdaLR), which the user passes again."""

    def __init__(self, rates: LearningRate) -> None:
        self._rates = rates

    def state_dict(self) -> Any:
        return None if self._rates.scheduler is None else _without_functions(self._rates.scheduler.state_dict())

    def load_state_dict(self, state: Any) -> None:
        scheduler = self._rates.scheduler
        if scheduler is not None and state:
            own = scheduler.state_dict()
            known = {key: value for key, value in state.items() if key in own}  # it may be of another class
            scheduler.load_state_dict({**own, **_with_counters(known, own)})


def _without_functions(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_functions(inner) for key, inner in value.items() if not callable(inner)}
    if isinstance(value, (list, tuple)):
        return [_without_functions(inner) for inner in value if not callable(inner)]
    return value


def _with_counters(saved: Any, own: Any) -> Any:
    """MultiStepLR requires a Counter, also inside a SequentialLR."""
    if isinstance(own, Counter):
        return Counter(saved)
    if isinstance(saved, dict) and isinstance(own, dict):
        return {key: _with_counters(value, own.get(key)) for key, value in saved.items()}
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [_with_counters(*pair) for pair in zip(saved, own, strict=True)]
    return saved


class RandomState:
    """The random generators of this rank. On a rank or layout that was not saved, they are seeded for the step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Tensor]:
        return rng.random_state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state:
            rng.set_random_state(state)
        else:
            self._engine.seed_drawing(self._engine.position.step)
