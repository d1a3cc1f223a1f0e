"""Replicas that train apart (`sync.every`): the mean gradient in their warm-up, then a round every few steps.

Between two rounds replicas hold different weights, buffers, averages (EMA) and optimizer state. Whatever leaves the run
(evaluations, state dicts, exports, checkpoints) is their mean. Training continues with the values of each replica, bit
for bit as if nothing had been evaluated or saved.

Replicas first exchange checksums, and only tensors that differ are averaged: none in the synchronous warm-up, and no
weights right after a round. What has no mean (integers, such as counts of steps) is taken from the first replica.

Checkpoints have:

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

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import Checkpoint
from paceline.checkpoint.state import REPLICAS, ReplicaPlace, ShardedState, ShardedStateful, Snapshot, StateEntry
from paceline.config.recipe import Config
from paceline.log import Log
from paceline.models.weights import as_moved, checksum
from paceline.parallel.shards import local_shard
from paceline.parallel.sync.exchange import Exchange
from paceline.parallel.sync.local_steps import LocalSteps, has_gaps, has_mean
from paceline.plan.network_model import Traffic
from paceline.plan.passes import uses_local_steps
from paceline.precision.policies import Scaler
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh, broadcast_from_first
from paceline.text import plural
from paceline.train.checkpointing.model_state import shard_of
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks
from paceline.train.weights_view import WeightsView

if TYPE_CHECKING:
    from paceline.train.engine import Engine

_PARTS = ("model/", "model-extra/", "ema/", "optimizer/", "optimizer-values/")
_KINDS = ("weights", "momentum", "feedback")
_SCALE = ("scale", "_growth_tracker")
_PIECE = 64 << 20  # bytes that are averaged at once: the memory that a save takes on a GPU


def build(context: FeatureContext) -> Hooks | None:
    steps, average = context.local_steps, context.replica_average
    if steps is None or average is None:
        return None
    groups = context.bound.optimizer.param_groups

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

    def values() -> dict[str, Tensor]:
        spread, steps.spread = steps.spread, None
        if spread is None:
            return {}
        if context.replicas is not None:  # now all have the same weights
            context.replicas.after_round()
        return {"replica_spread": spread}

    def restart() -> None:
        steps.load_state_dict({})

    def view(own: WeightsView) -> WeightsView:
        return replace(own, swapped=average.swapped, means=average.of)

    named = context.parts.model.named_parameters()
    parameters = {name: parameter for name, parameter in named if name not in context.parts.tied_copies}
    state = [StateEntry("outer", RoundState(steps, average.place, parameters), volatile=False)]
    if context.bound.scaler.is_enabled():
        scaler = ReplicaScaler(context.bound.scaler)
        state.append(StateEntry("replica-scaler", scaler, per_rank=True, if_absent="keep"))
    return Hooks(
        name="local_steps",
        on_reduced=on_reduced,
        after_update=after_update,
        values=values,
        end=steps.average,
        restart=restart,
        view=view,
        state=state,
    )


def build_local_steps(
    config: Config, module: nn.Module, mesh: Mesh, log: Log, traffic: Traffic | None
) -> LocalSteps | None:
    """None if replicas average their gradients in every step, or if there is one replica only."""
    if config.sync is None or config.sync.every is None:
        return None
    if not uses_local_steps(config, mesh.degrees):
        log.info(f"sync.every: {config.sync.every} is not used, there is one rank")
        return None
    parameters = {name.removeprefix("model."): parameter for name, parameter in module.named_parameters()}
    for parameter in parameters.values():
        if has_gaps(local_shard(parameter)):
            parameter.data = parameter.data.contiguous()
    section = config.sync
    after = f" after {plural(section.warmup, 'synchronous step')}" if section.warmup else ""
    rounds = f"a round every {plural(config.sync.every, 'step')}{after}"
    log.info(f"sync: {mesh.degrees.replicate} replicas, {rounds}, outer: {section.outer.name}")
    return LocalSteps(
        section,
        Exchange(mesh.group("replicate"), traffic),
        {name: local_shard(parameter) for name, parameter in parameters.items()},
        lambda: {name.removeprefix("model."): buffer for name, buffer in module.named_buffers()},
        trains=lambda name: parameters[name].requires_grad,
        device=mesh.device,
    )


def replicas_differ(local_steps: LocalSteps | None) -> bool:
    """Whether replicas have different weights now, as they do between two rounds."""
    return local_steps is not None and local_steps.replicas_differ


class ReplicaAverage:
    """Averages over replicas. All methods are collective: must be called on every rank."""

    def __init__(self, local_steps: LocalSteps, model: nn.Module, mesh: Mesh) -> None:
        self._local_steps, self._model, self._mesh = local_steps, model, mesh
        self.place = ReplicaPlace(mesh.coords["replicate"], mesh.degrees.replicate)

    def differing(self, tensors: Mapping[str, Tensor], *, buffers: Collection[str] = ()) -> dict[str, list[int]]:
        """The names of local shards that differ between replicas, on any rank, with the replicas that have them: an
        optimizer has no state yet for parameters that it has not updated. `buffers` are also compared inside replicas,
        whose ranks compute statistics of different samples."""
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        coords = {axis: coord for axis, coord in self._mesh.coords.items() if axis != "replicate"}
        shard, stage = str(coords), str({**coords, "shard": 0})
        values: dict[tuple[str, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # by replica
        for *places, replica, own in collectives.all_gather_object([shard, stage, self.place.number, sums]):
            for name, value in own.items():
                values[name, places[name in buffers]][replica].add(value)
        return {
            name: sorted(by_replica)
            for (name, _), by_replica in values.items()
            if len(by_replica) < self.place.count or len(set.union(*by_replica.values())) > 1
        }

    def means(self, tensors: Mapping[str, Tensor], differing: Mapping[str, list[int]]) -> Iterator[tuple[str, Tensor]]:
        """The means of tensors that differ and that every replica has, a few at a time."""
        piece: dict[str, Tensor] = {}
        for name in sorted(name for name, replicas in differing.items() if len(replicas) == self.place.count):
            if name in tensors:
                piece[name] = tensors[name]
                if sum(tensor.nbytes for tensor in piece.values()) >= _PIECE:
                    yield from self._local_steps.mean_of(piece).items()
                    piece = {}
        if piece:
            yield from self._local_steps.mean_of(piece).items()

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The mean of each tensor; the tensor itself if it is the same on all replicas."""
        return {**tensors, **dict(self.means(tensors, self.differing(tensors)))}

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model has the mean weights and buffers inside the context, and its own ones afterwards, bit for bit.

        Values are copied in place, as in `Ema.swapped`, but only those that differ: a round averages what was written
        to since the last one."""
        buffers = dict(self._model.named_buffers())
        tensors = {**{name: local_shard(p).detach() for name, p in self._model.named_parameters()}, **buffers}
        differing = self.differing(tensors, buffers=buffers)
        own = {name: tensors[name].clone() for name in tensors if name in differing}
        try:
            with torch.no_grad():
                for name, mean in self.means(tensors, differing):
                    tensors[name].copy_(mean)
                if self._mesh.degrees.shard > 1:
                    for name in sorted(buffers.keys() & differing.keys()):
                        broadcast_from_first(as_moved(buffers[name]), self._mesh.group("shard"))
            yield
        finally:
            with torch.no_grad():
                for name, value in own.items():
                    tensors[name].copy_(value)


def with_means(snapshot: Snapshot, average: ReplicaAverage, *, own: bool = True, planned: bool = False) -> Snapshot:
    """The snapshot of a replica's own state, with means under its paths; and besides, if `own`, what the replica had.
    Collective.

    Means are moved to the CPU: a copy of the whole state may not fit on a GPU. If it is `planned` only, everything is
    expected to differ, and the means are left uninitialized."""
    place = average.place
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

    def __init__(self, local_steps: LocalSteps, place: ReplicaPlace, parameters: Mapping[str, Tensor]) -> None:
        self._local_steps, self._place, self._parameters = local_steps, place, parameters

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


def report_other_replicas(engine: Engine, manifest: Manifest) -> None:
    """Log what the replicas of this run start from, if it is not what they had."""
    saved, own = _replicas_in(manifest), engine.mesh.degrees.replicate
    if not saved or (engine.mesh.local_replicas > 1 and own == saved):
        return
    start = "the run starts" if own == 1 else f"all {own} replicas start"
    outer = (
        "; outer weights and momentum are kept, error feedback starts at zero" if engine.mesh.local_replicas > 1 else ""
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
