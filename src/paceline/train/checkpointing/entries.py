"""The state entries of a checkpoint.

    model/<name>                     weights and buffers
    ema/<name>                       EMA weights
    optimizer/<name>/<key>           optimizer state of a parameter: tensors
    optimizer-values/<name>/<key>    and plain numbers
    compression/…, comm-state/…      what reduces gradients: see features/compress.py
    random/rank-<r>/<generator>      random state of each rank
    outer/…, replicas/<r>/…          of replicas that train apart: see features/local_steps.py

To checkpoint another part, add a `StateEntry` to `training_state`, or to the hooks of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from paceline.checkpoint.export import PretrainedFiles, is_pretrained
from paceline.checkpoint.state import StateEntry, TrainingState
from paceline.runtime import rng
from paceline.train.callbacks import Callbacks
from paceline.train.checkpointing.model_state import ModelState
from paceline.train.checkpointing.optimizer_state import OptimizerState
from paceline.train.engine import Engine
from paceline.train.evaluate import EvaluationPolicy
from paceline.train.first_step import BucketSizeState
from paceline.train.weights_view import WeightsView

_ORDER = (  # of entries in the manifest, and of applying them: others may depend on weights
    "model", "ema", "optimizer", "scaler", "plateau", "scheduler", "position", "outcome", "callbacks",
    "compression", "comm-state", "random", "criterion", "bucket_mb", "huggingface", "outer", "replica-scaler",
)  # fmt: skip


def training_state(engine: Engine, view: WeightsView, policy: EvaluationPolicy, callbacks: Callbacks) -> TrainingState:
    """All entries of a checkpoint; those of features that are not in `_ORDER` come last."""
    entries = [
        StateEntry("model", ModelState(engine, view), scope="weights", volatile=False),
        StateEntry("optimizer", OptimizerState(engine), volatile=False),
        StateEntry("position", engine.position),
        StateEntry("outcome", policy),
        StateEntry("callbacks", callbacks),
        StateEntry("random", RandomState(engine), per_rank=True),
        *engine.hooks.state,
    ]
    if (criterion := engine.user.stateful_loss) is not None:
        entries.append(StateEntry("criterion", CriterionState(criterion), if_absent="keep"))
    if engine.config.ddp.bucket_mb == "auto":
        entries.append(StateEntry("bucket_mb", BucketSizeState(engine), if_absent="keep"))
    if is_pretrained(engine.parts.model):
        entries.append(StateEntry("huggingface", PretrainedFiles(engine.parts.model), if_absent="keep"))
    entries.sort(key=lambda entry: _ORDER.index(entry.key) if entry.key in _ORDER else len(_ORDER))
    layout, average = engine.layout_facts(), engine.features.replica_average
    replica = None if average is None else average.place
    return TrainingState(entries, rank=engine.world.rank_info.rank, layout=layout, replica=replica)


class CriterionState:
    """Parameters and buffers of a criterion, such as the center of DINO."""

    def __init__(self, criterion: nn.Module) -> None:
        self._criterion = criterion

    def state_dict(self) -> dict[str, Any]:
        return self._criterion.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._criterion.load_state_dict(state, strict=False)


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
