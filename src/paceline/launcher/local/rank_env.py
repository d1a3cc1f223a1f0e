"""Environment variables of the launcher, set before torch is imported, and of its ranks."""

from __future__ import annotations

import os
import sys
import uuid
from typing import TYPE_CHECKING

from paceline.config.launch import LaunchSpec
from paceline.launcher.local.start import LocalStart
from paceline.runtime import environment

if TYPE_CHECKING:
    from paceline.launcher.local.rendezvous import Rendezvous


def prepare_environment(spec: LaunchSpec) -> None:
    """Call before torch is imported, which reads them."""
    os.environ.update(spec.env)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Divide the cores among the ranks unless the user decided otherwise; torchrun sets 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (spec.ranks or spec.default_cpu_ranks))))


def rank_environment(start: LocalStart, rendezvous: Rendezvous, error_folder: str) -> list[dict[str, str]]:
    """The variables of each rank of this node: torchrun's, and ours."""
    node, spec, run_id = start.node, start.spec, uuid.uuid4().hex
    common = {
        environment.LAUNCHED: "1",
        **start.logs.environment,
        **start.env,
        "GROUP_RANK": str(node.number),
        "GROUP_WORLD_SIZE": str(node.nodes),
        "ROLE_NAME": "rank",
        "ROLE_WORLD_SIZE": str(node.world),
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
        environment.RESTART_COUNT: str(start.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(max(spec.max_restarts, start.generation)),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if sys.platform == "linux" and (interface := node.interface or ("lo" if node.nodes == 1 else None)):
        # A value set by the user takes precedence.
        common |= {name: os.environ.get(name, value) for name, value in environment.interfaces(interface).items()}
    each = []
    for local, rank in enumerate(node.rank_range):
        own = environment.variables(environment.RankInfo(rank, node.world, local, node.ranks))
        # Where torch's @record, which many scripts use, writes an exception.
        error_file = f"{error_folder}/{local}.json"
        each.append({**common, **own, "ROLE_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error_file})
    return each
