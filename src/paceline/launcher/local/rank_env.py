"""The environment variables of ranks: what the launcher sets for itself before torch is imported, and for ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paceline.config.launch import LaunchSpec
from paceline.launcher.local import interrupts
from paceline.launcher.local.start import LocalStart
from paceline.runtime import environment


def prepare_environment(spec: LaunchSpec) -> None:
    """Before torch is imported, which reads it."""
    os.environ.update(spec.env)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # A fair share of the cores for each rank, unless somebody decided otherwise; torchrun would give it one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (spec.ranks or spec.default_cpu_ranks))))


@contextmanager
def rank_environment(start: LocalStart) -> Iterator[None]:
    """What ranks find in their environment besides torchrun's variables; this process's own is given back."""
    node = start.node
    wanted = {environment.LAUNCHED: "1", **start.logs.environment, **start.env}
    wanted[interrupts.TORCHS_OWN] = "none"
    if sys.platform == "linux" and (interface := node.interface or ("lo" if node.nodes == 1 else None)):
        # What somebody has set is right: they know their network.
        wanted["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", interface)
        if node.nodes > 1:
            wanted["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}")
    with _set(wanted):
        yield


@contextmanager
def _set(wanted: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
