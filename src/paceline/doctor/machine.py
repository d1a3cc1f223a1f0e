"""All checks of one machine, in the order in which they are printed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.config.recipe import Config
from paceline.doctor import fabric, gpus, interfaces, limits, local_ranks, software, storage, variables
from paceline.doctor.finding import Finding
from paceline.doctor.gpus import GpuFacts
from paceline.errors import PacelineError

_CPU_RANKS = 2  # that a recipe starts without GPUs


def check_machine(
    gpu_facts: GpuFacts,
    *,
    ranks: int | None = None,
    several_hosts: bool = False,
    folder: Path = Path("runs"),
    port: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """`ranks`: that training would start here, by default one per GPU; `folder`: in which runs are."""
    network, adapters = interfaces.read(environment=environment), fabric.read()
    ranks = ranks or _default_ranks(gpu_facts)
    needs_locked_memory = adapters.has_infiniband and several_hosts and bool(gpu_facts.gpus)
    return [
        *software.check(gpu_facts.gpus),
        *gpus.check(gpu_facts),
        *fabric.check(adapters, len(gpu_facts.gpus), several_hosts),
        *limits.check(ranks, has_infiniband=needs_locked_memory, several_hosts=several_hosts),
        *storage.check(folder),
        *interfaces.check(network, port=port, several_hosts=several_hosts),
        *variables.check(
            environment,
            interfaces=[each.name for each in network.interfaces],
            gpus=gpu_facts.number,
            ranks=ranks,
            has_infiniband=adapters.has_infiniband,
            several_hosts=several_hosts,
        ),
    ]


def check_training(gpu_facts: GpuFacts, config: Config | None, ranks: int | None) -> list[Finding]:
    """What a launch would check before ranks start, and a real all-reduce on the device of the recipe."""
    device, backend = (None, None) if config is None else (config.device, config.backend)
    recipe = [] if config is None else [_check_recipe(config, ranks or _default_ranks(gpu_facts))]
    return [*recipe, local_ranks.check(device, backend, len(gpu_facts.gpus))]


def _default_ranks(gpu_facts: GpuFacts) -> int:
    return len(gpu_facts.gpus) or _CPU_RANKS


def _check_recipe(config: Config, ranks: int) -> Finding:
    from paceline.train.factory import check

    try:
        check(config, ranks)
    except PacelineError as error:
        return Finding("recipe", "fail", f"[{error.code}] {error.what}", error.why, error.fix)
    return Finding("recipe", "ok", f"valid on {ranks} ranks")
