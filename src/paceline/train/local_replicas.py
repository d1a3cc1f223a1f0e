"""Connects local steps (`sync: {every: …}`) with the parameters and the mesh of this rank."""

from __future__ import annotations

from torch import nn

from paceline.config.recipe import Config
from paceline.log import Log
from paceline.parallel.shards import local_shard
from paceline.plan.network_model import Traffic
from paceline.plan.passes import uses_local_steps
from paceline.runtime.mesh import Mesh
from paceline.sync.exchange import Exchange
from paceline.sync.flat_tensors import has_gaps
from paceline.sync.local_steps import LocalSteps
from paceline.text import plural


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
