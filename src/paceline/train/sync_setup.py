"""Connects the section `sync` with the parameters and the mesh of this rank: local steps (`every`), and the average of
replicas that train apart.

Between two rounds of local steps replicas hold different weights, buffers, averages (EMA) and optimizer state. Whatever
leaves the run (evaluations, state dicts, exports, checkpoints) is their mean. Training continues with the values of
each replica, bit for bit as if nothing had been evaluated or saved.

DynamicDDP first exchange checksums, and only tensors that differ are averaged: none in the synchronous warm-up, and no
weights right after a round. What has no mean (integers, such as counts of steps) is taken from the first replica. The
EMA is linear in the weights, so the mean of the replicas' EMAs is the EMA of their mean weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.models.weights import as_moved, checksum
from paceline.parallel.shards import local_shard
from paceline.parallel.sync.exchange import Exchange
from paceline.parallel.sync.local_steps import LocalSteps, has_gaps
from paceline.plan.network_model import Traffic
from paceline.plan.passes import uses_local_steps
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh, broadcast_from_first
from paceline.text import plural

_PIECE = 64 << 20  # bytes that are averaged at once: the memory that a save takes on a GPU


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
        self.replica, self.replicas = mesh.coords["replicate"], mesh.degrees.replicate

    def differing(self, tensors: Mapping[str, Tensor], *, buffers: Collection[str] = ()) -> dict[str, list[int]]:
        """The names of local shards that differ between replicas, on any rank, with the replicas that have them: an
        optimizer has no state yet for parameters that it has not updated. `buffers` are also compared inside replicas,
        whose ranks compute statistics of different samples."""
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        coords = {axis: coord for axis, coord in self._mesh.coords.items() if axis != "replicate"}
        shard, stage = str(coords), str({**coords, "shard": 0})
        values: dict[tuple[str, str], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # by replica
        for *places, replica, own in collectives.all_gather_object([shard, stage, self.replica, sums]):
            for name, value in own.items():
                values[name, places[name in buffers]][replica].add(value)
        return {
            name: sorted(by_replica)
            for (name, _), by_replica in values.items()
            if len(by_replica) < self.replicas or len(set.union(*by_replica.values())) > 1
        }

    def means(self, tensors: Mapping[str, Tensor], differing: Mapping[str, list[int]]) -> Iterator[tuple[str, Tensor]]:
        """The means of tensors that differ and that every replica has, a few at a time."""
        piece: dict[str, Tensor] = {}
        for name in sorted(name for name, replicas in differing.items() if len(replicas) == self.replicas):
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
