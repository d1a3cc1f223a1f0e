"""Environment variables of the launcher, set before torch is imported, and of its ranks."""

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
    """Call before torch is imported, which reads them."""
    os.environ.update(spec.env)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Divide the cores among the ranks unless the user decided otherwise; torchrun sets 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (spec.ranks or spec.default_cpu_ranks))))


@contextmanager
def rank_environment(start: LocalStart) -> Iterator[None]:
    """Set the variables of ranks, besides those of torchrun, during the block."""
    node = start.node
    wanted = {environment.LAUNCHED: "1", **start.logs.environment, **start.env}
    wanted[interrupts.TORCHS_OWN] = "none"
    if sys.platform == "linux" and (interface := node.interface or ("lo" if node.nodes == 1 else None)):
        # A value set by the user takes precedence.
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
