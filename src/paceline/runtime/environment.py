"""The environment variables of a rank: torchrun's, and those that paceline's launcher adds.

The only module that spells them. torchrun, paceline's launcher and `torch.distributed.launch` set the same variables
for a rank; if they are missing, those of mpirun and srun are used (scheduler_env.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config.launch import DEFAULT_PORT
from paceline.errors import WorldError
from paceline.run.folder import RunFolder
from paceline.runtime.network import LOOPBACK
from paceline.runtime.scheduler_env import number, read_task

RUN_FOLDER = "PACELINE_RUN"  # set if the launch has a run folder
RUN_NAMED = "PACELINE_RUN_NAMED"  # set if the command line names it
LOG_FOLDER = "PACELINE_PROGRESS"  # that folder, or a temporary one with its layout: heartbeats and logs of this node
SUSPECT_STEP = "PACELINE_SUSPECT_STEP"  # the step whose samples ranks record, counted from 1
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
DEBUG = "PACELINE_DEBUG"
LAUNCHED = "PACELINE_LAUNCHED"
TOKEN = "PACELINE_TOKEN"  # the secret that the launchers of a job share


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, globally and on its node."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    reported_nodes: int | None = None  # set by the launcher, since nodes may have different numbers of ranks

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return self.reported_nodes or -(-self.world // self.local_world)


@dataclass(frozen=True)
class ExportedRank:
    """RANK and WORLD_SIZE exported by a person or an operator, who may count ranks or nodes."""

    rank: int
    world: int
    host: str
    port: int


def read_rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """The rank that a launcher assigned to this process; None without a launcher."""
    if not _has_rank(environment):
        task = read_task(environment)
        return None if task is None else RankInfo(task.rank, task.world, task.local_rank, task.local_world, task.nodes)
    rank, world = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise WorldError(
            "bad-environment",
            f"Invalid RANK {rank} for WORLD_SIZE {world}.",
            why="RANK must be between 0 and WORLD_SIZE - 1",
            fix="let a launcher set these: paceline launch -n 2 script.py",
        )
    local_world = max(1, number(environment, "LOCAL_WORLD_SIZE", default=world))
    local_rank = number(environment, "LOCAL_RANK", default=rank % local_world)
    nodes = number(environment, "GROUP_WORLD_SIZE", default=0) if is_rank(environment) else 0
    return RankInfo(rank, world, local_rank, local_world, nodes or None)


def read_exported(environment: Mapping[str, str] = os.environ) -> ExportedRank | None:
    """Exported RANK and WORLD_SIZE, if MASTER_ADDR is set too. A launcher of ranks also sets LOCAL_RANK."""
    host = environment.get("MASTER_ADDR")
    if not _has_rank(environment) or is_rank(environment) or not host:
        return None
    info = read_rank_info(environment) or RankInfo()
    return ExportedRank(info.rank, info.world, host, number(environment, "MASTER_PORT", default=DEFAULT_PORT))


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher of ranks started this process."""
    return "LOCAL_RANK" in environment


def _has_rank(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment and "WORLD_SIZE" in environment


def incomplete_rank(environment: Mapping[str, str] = os.environ) -> str:
    """`WORLD_SIZE` or `RANK` if it is set without the other, which has no effect; else empty."""
    found = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
    return found[0] if len(found) == 1 else ""


def rendezvous_endpoint(environment: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Host and port of the rendezvous of the ranks; None if the environment does not name it."""
    host = environment.get("MASTER_ADDR")
    task = None if _has_rank(environment) else read_task(environment)
    if task is not None:
        host, default_port = (host, DEFAULT_PORT) if host else task.rendezvous()
        return host, number(environment, "MASTER_PORT", default=default_port)
    return (host, number(environment, "MASTER_PORT")) if host and "MASTER_PORT" in environment else None


def has_agent_store(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the store for the rendezvous is in the process of the launcher. Otherwise rank 0 hosts it."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_on_one_machine(info: RankInfo, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks are known to be on this machine."""
    if info.reported_nodes is not None or "LOCAL_WORLD_SIZE" in environment:
        return info.nodes == 1
    # In the first pod of an older PyTorchJob, too, it is localhost, and other ranks are on other machines.
    is_loopback = environment.get("MASTER_ADDR") in ("localhost", LOOPBACK, "::1")
    return is_loopback and "KUBERNETES_SERVICE_HOST" not in environment


def interfaces(name: str) -> dict[str, str]:
    """Variables that restrict gloo and NCCL to one network interface."""
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def rendezvous_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """The rendezvous as `host:port`."""
    if (endpoint := rendezvous_endpoint(environment)) is None:
        return None
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def variables(info: RankInfo) -> dict[str, str]:
    """The variables that a launcher sets for a rank."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world),
    }


def run_folder(environment: Mapping[str, str] = os.environ) -> RunFolder | None:
    """The run folder that the launcher created or resumed, if any."""
    return _folder(environment, RUN_FOLDER)


def is_run_named(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the command line names the run, whatever the script says."""
    return RUN_NAMED in environment


def log_folder(environment: Mapping[str, str] = os.environ) -> RunFolder | None:
    """Where the launcher looks for the heartbeats of this node's ranks; None without a launcher."""
    return _folder(environment, LOG_FOLDER)


def _folder(environment: Mapping[str, str], name: str) -> RunFolder | None:
    return RunFolder(Path(environment[name])) if environment.get(name) else None


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """How many times the launcher has restarted the ranks."""
    return _integer(environment, RESTART_COUNT) or 0


def suspect_step(environment: Mapping[str, str] = os.environ) -> int | None:
    """The step whose samples each rank records, if the launcher requests one."""
    return _integer(environment, SUSPECT_STEP)


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def was_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether paceline's launcher started this process. It reports failures, so the rank does not have to."""
    return LAUNCHED in environment


def is_interactive() -> bool:
    """Whether this is an interpreter or a notebook, rather than a program that has only imported IPython."""
    ipython = sys.modules.get("IPython")
    return hasattr(sys, "ps1") or (ipython is not None and ipython.get_ipython() is not None)


def debug_enabled(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether collectives are checked for consistency across ranks."""
    return environment.get(DEBUG, "").lower() in {"1", "true", "on", "yes"}
