"""What was asked for on the command line or in the recipe, for every way of launching."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.launcher.workload import GRACE


@dataclass(frozen=True)
class Launch:
    ranks: int | None  # on each machine; None: choose, and say so
    run: str | None  # name of the run folder; None leaves nothing behind
    on_cpu: int = 1  # ranks to choose where there is no GPU
    device: str | int | None = None
    port: int | None = None
    fresh: bool = False
    fallback: bool = False  # where ranks can't meet, go on as one
    env: Mapping[str, str] | None = None  # variables that every rank must have
    grace: float | None = None  # seconds that a SIGTERM leaves the ranks, where those are more than usual
    resume: str | None = None  # auto: the newest run of that name; or the folder of a run or a checkpoint
    max_restarts: int = 0
    restarted: int = 0  # how often something else, a scheduler, has started this job before
    tee: tuple[int, ...] = ()  # ranks whose output is on screen, each line with its rank
    nodes: tuple[int, int] = (1, 1)  # the fewest and the most
    wait: float = 600.0  # seconds in which the nodes have to come
    interface: str | None = None  # that reaches the other nodes; found where it is not set

    @property
    def patience(self) -> float:
        return max(GRACE, self.grace or 0.0)


def prepare_environment(launch: Launch) -> None:
    """Before torch is imported, which reads it."""
    os.environ.update(launch.env or {})
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # A fair share of the cores for each rank, unless somebody decided otherwise; torchrun would give it one.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (launch.ranks or launch.on_cpu))))
