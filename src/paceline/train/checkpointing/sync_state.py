"""What `sync` and communication hooks add to checkpoints. Of replicas that train apart (`sync: {every: …}`):

    model/<name>, ema/<name>, optimizer/…        the mean over replicas: any layout loads it, and exports use it
    replicas/<r>/model/<name>, …                 what replica r had, of the tensors that differ between replicas
    outer/weights/<name>, outer/momentum/<name>  weights after the last round, and momentum of the outer optimizer
    replicas/<r>/outer/feedback/<name>           what the compression of replica r left out (error feedback)
    replica-scaler/rank-<r>/…                    the loss scale of each rank (fp16)

On the same number of replicas each continues with its own state, with the same bits as an uninterrupted run. On another
number, and without `sync`, all start from the mean; the state of the outer optimizer is kept, and error feedback starts
at zero. A checkpoint of a run without local steps is like one right after a round, without momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.state import REPLICAS, ReplicaPlace, ShardedState, ShardedStateful, Snapshot
from paceline.parallel.sync.local_steps import LocalSteps, has_mean
from paceline.precision.policies import Scaler
from paceline.text import plural
from paceline.train.checkpointing.model_state import shard_of
from paceline.train.engine import Engine
from paceline.train.sync_setup import ReplicaAverage

_PARTS = ("model/", "model-extra/", "ema/", "optimizer/", "optimizer-values/")
_KINDS = ("weights", "momentum", "feedback")
_SCALE = ("scale", "_growth_tracker")


def with_means(snapshot: Snapshot, average: ReplicaAverage, *, own: bool = True, planned: bool = False) -> Snapshot:
    """The snapshot of a replica's own state, with means under its paths; and besides, if `own`, what the replica had.
    Collective.

    Means are moved to the CPU: a copy of the whole state may not fit on a GPU. If it is `planned` only, everything is
    expected to differ, and the means are left uninitialized."""
    place = ReplicaPlace(average.replica, average.replicas)
    parts = {path: shard.local.detach() for path, shard in snapshot.tensors.items() if path.startswith(_PARTS)}
    # Counts of steps are scalars. A fraction would not be one.
    counts = {path for path, each in parts.items() if path.startswith("optimizer") and not each.dim()}
    averaged = {path: each for path, each in parts.items() if has_mean(each) and path not in counts}
    if planned:
        differing = {path: list(range(place.count)) for path in parts}
        means = {path: torch.empty_like(each, device="cpu") for path, each in averaged.items()}
    else:
        differing = average.differing(parts)
        means = {path: mean.cpu() for path, mean in average.means(averaged, differing)}
    tensors, volatile = dict(snapshot.tensors), set(snapshot.volatile)
    for path in sorted(differing.keys() & parts.keys()):  # in the same order in every save, whose plan is reused
        if own:
            tensors[place.own(path)] = tensors[path]
            volatile |= {place.own(path)} if path in snapshot.volatile else set()
        if path in means:
            tensors[path] = replace(tensors[path], local=means[path])
        elif place.number != differing[path][0]:
            del tensors[path]
    return replace(snapshot, tensors=tensors, volatile=volatile)


class RoundState(ShardedStateful):
    """What the next round needs besides the weights."""

    def __init__(self, engine: Engine, local_steps: LocalSteps) -> None:
        self._engine, self._local_steps = engine, local_steps
        self._place = replica_place(engine)
        named, copies = engine.model.named_parameters(), engine.parts.tied_copies
        self._parameters = {name: parameter for name, parameter in named if name not in copies}

    def sharded_state(self) -> ShardedState:
        state = ShardedState()
        for kind, tensors in self._local_steps.state_dict().items():
            for name, tensor in tensors.items():
                state.tensors[_outer(kind, name)] = shard_of(tensor, self._parameters[name])
        for kind, tensors in self._local_steps.local_state().items():
            for name, tensor in tensors.items():
                state.tensors[self._place.own(_outer(kind, name))] = shard_of(tensor, self._parameters[name])
        return state

    def read_targets(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        manifest = checkpoint.manifest
        paths = {_outer(kind, name): each for kind in _KINDS for name, each in self._parameters.items()}
        return {path: each for path, each in paths.items() if self._place.source(path, manifest) in manifest.tensors}

    def load_sharded_state(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], values: Any) -> None:
        steps = self._local_steps
        saved = {
            kind: {name: tensors[path] for name in self._parameters if (path := _outer(kind, name)) in tensors}
            for kind in _KINDS
        }
        steps.load_state_dict(saved)
        manifest, own = checkpoint.manifest, self._place.own("model/")
        same_number = _replicas_in(manifest) == self._place.count
        steps.replicas_differ = same_number and any(path.startswith(own) for path in manifest.tensors)
        if not saved["weights"] and steps.compares:  # `outer` was another one: this is not right after a round
            steps.average()


class ReplicaScaler:
    """The loss scale of this rank: replicas may have skipped different steps."""

    def __init__(self, scaler: Scaler) -> None:
        self._scaler = scaler

    def state_dict(self) -> dict[str, Tensor]:
        own = self._scaler.state_dict()
        return {key: torch.tensor(float(own[key]), dtype=torch.float64) for key in _SCALE}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing on another layout: the scale of rank 0 was loaded."""
        if state:
            own = self._scaler.state_dict()
            self._scaler.load_state_dict({**own, **{key: type(own[key])(state[key]) for key in _SCALE}})


def replica_place(engine: Engine) -> ReplicaPlace:
    return ReplicaPlace(engine.mesh.coords["replicate"], engine.mesh.degrees.replicate)


def report_other_replicas(engine: Engine, manifest: Manifest) -> None:
    """Log what the replicas of this run start from, if it is not what they had."""
    saved, own = _replicas_in(manifest), engine.mesh.degrees.replicate
    if not saved or (engine.local_steps is not None and own == saved):
        return
    start = "the run starts" if own == 1 else f"all {own} replicas start"
    outer = (
        "; outer weights and momentum are kept, error feedback starts at zero" if engine.local_steps is not None else ""
    )
    engine.log.info(
        f"the checkpoint is of {plural(saved, 'replica')} that trained apart: {start} from the mean of their weights, "
        f"EMA and optimizer state{outer}"
    )


def _outer(kind: str, name: str) -> str:
    return f"outer/{kind}/{name}"


def _replicas_in(manifest: Manifest) -> int:
    """The number of replicas that had trained apart, 0 if they had not."""
    apart = any(path.startswith(f"{REPLICAS}/") for path in manifest.tensors)
    return int(manifest.layout.get("replicate", 1)) if apart else 0
