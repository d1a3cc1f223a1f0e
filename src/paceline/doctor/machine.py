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
    graphics: GpuFacts,
    *,
    ranks: int | None = None,
    several_hosts: bool = False,
    folder: Path = Path("runs"),
    port: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """`ranks`: that training would start here, by default one per GPU; `folder`: in which runs are."""
    network, adapters = interfaces.read(environment=environment), fabric.read()
    ranks = ranks or _default_ranks(graphics)
    has_infiniband = bool(adapters.ports)
    return [
        *software.check(graphics.gpus),
        *gpus.check(graphics),
        *fabric.check(adapters, len(graphics.gpus), several_hosts),
        *limits.check(ranks, has_infiniband=has_infiniband, several_hosts=several_hosts),
        *storage.check(folder),
        *interfaces.check(network, port=port, several_hosts=several_hosts),
        *variables.check(
            environment,
            interfaces=[each.name for each in network.interfaces],
            gpus=graphics.number,
            ranks=ranks,
            has_infiniband=has_infiniband,
            several_hosts=several_hosts,
        ),
    ]


def check_training(graphics: GpuFacts, config: Config | None, ranks: int | None) -> list[Finding]:
    """What a launch would check before ranks start, and a real all-reduce on the device of the recipe."""
    device, backend = (None, None) if config is None else (config.device, config.backend)
    recipe = [] if config is None else [_check_recipe(config, ranks or _default_ranks(graphics))]
    return [*recipe, local_ranks.check(device, backend, len(graphics.gpus))]


def _default_ranks(graphics: GpuFacts) -> int:
    return len(graphics.gpus) or _CPU_RANKS


def _check_recipe(config: Config, ranks: int) -> Finding:
    from paceline.train.factory import check

    try:
        check(config, ranks)
    except PacelineError as error:
        return Finding("recipe", "fail", f"[{error.code}] {error.what}", error.why, error.fix)
    return Finding("recipe", "ok", f"valid on {ranks} ranks")
