"""Reads the number of nodes, the node rank and the coordinator's address from the environment.

Schedulers and operators that start one command per node set them in one of these ways:

    PET_NNODES, PET_NODE_RANK, …        torchrun's variables, set by Kubeflow's TrainJob and newer PyTorchJobs
    RANK, WORLD_SIZE in a PyTorchJob    older PyTorchJobs; they count pods, not ranks
    one task of srun per node           SLURM_PROCID, …
    one process of mpirun per node      OMPI_COMM_WORLD_RANK, …, PMI_RANK, …

Some guides export RANK as the first rank of a node and WORLD_SIZE as the number of all ranks. This is supported with
`paceline.launch(fn, ranks=4)`. `paceline launch` assigns ranks itself, so each node would silently train on its own;
it raises an error instead.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from paceline.config.launch import DEFAULT_PORT, Endpoint, NodeRange
from paceline.errors import LaunchError, WorldError
from paceline.runtime.environment import ExportedRank, is_rank, read_exported, rendezvous_endpoint
from paceline.runtime.scheduler_env import number, read_task
from paceline.text import plural

_TORCHRUN = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")
_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,252}")  # name or address
_POD = re.compile(r".*-(?:master|worker)-[0-9]+")


@dataclass(frozen=True)
class NodeEnvironment:
    """The settings of a job of several nodes. The command line takes precedence."""

    nodes: NodeRange
    node_rank: int | None  # None: assigned by the coordinator
    master_host: str | None  # None: not set
    master_port: int
    ranks: int | None  # on this node; None: the default
    source: str  # of the settings, for messages

    def __post_init__(self) -> None:
        if not 1 <= self.nodes.fewest <= self.nodes.most or not 0 <= (self.node_rank or 0) < self.nodes.most:
            _invalid(self.source, f"{self.nodes} nodes, node rank {self.node_rank}")
        if self.master_host is not None and not _HOST.fullmatch(self.master_host):
            _invalid(self.source, f"master address {self.master_host!a}")
        if not 0 < self.master_port < 65536:
            _invalid(self.source, f"master port {self.master_port}")
        if self.ranks == 0:
            _invalid(self.source, "0 ranks per node")

    def describe(self) -> str:
        """nodes: 2, this is node 1 (from PET_* variables)"""
        which = "" if self.node_rank is None else f", this is node {self.node_rank}"
        return f"nodes: {self.nodes}{which} (from {self.source})"

    def endpoint(self) -> Endpoint:
        """The address of the coordinator."""
        if self.master_host is None:
            raise LaunchError(
                "no-master",
                f"The environment ({self.source}) sets {self.nodes} nodes, but no master address.",
                fix="pass --master HOST:29500, where HOST is the name or address of the first node",
            )
        return Endpoint(self.master_host, self.master_port)


def read_node_environment(environment: Mapping[str, str] = os.environ) -> NodeEnvironment | None:
    """The settings of a scheduler or operator, if there are any."""
    if is_rank(environment):
        return None  # inherited from the launcher of this rank
    return _torchrun(environment) or _pytorch_job(environment) or _task(environment)


def first_rank_environment(environment: Mapping[str, str], ranks: int) -> NodeEnvironment | None:
    """Interpret an exported RANK as the first of `ranks` ranks on this node, and WORLD_SIZE as all ranks."""
    found = read_exported(environment)
    if found is None or found.world == 1 or (found.rank, found.world) == (0, ranks):
        return None
    if found.rank % ranks or found.world % ranks:
        raise LaunchError(
            "first-rank",
            f"RANK={found.rank} and WORLD_SIZE={found.world} do not match {ranks} ranks on this node.",
            why="with launch(), an exported RANK is the first rank of a node, and WORLD_SIZE is the total, so "
            f"both must be multiples of {ranks}",
            fix=f"on node I of N, export RANK=I×{ranks} WORLD_SIZE=N×{ranks}; on a single node, unset both",
        )
    nodes = NodeRange(found.world // ranks, found.world // ranks)
    return NodeEnvironment(nodes, found.rank // ranks, found.host, found.port, ranks, "RANK, as a first rank")


def reject_exported_rank(environment: Mapping[str, str], ranks: int, command: Sequence[str]) -> None:
    """Raise an error if an exported RANK refers to other nodes, but the command line does not.

    `command` are the arguments of `paceline`: the verb, its options and the rest.
    """
    found = read_exported(environment)
    if found is None or found.world == 1 or (found.rank, found.world) == (0, ranks):
        return
    if read_node_environment(environment) is not None:
        return
    raise LaunchError(
        "two-worlds",
        f"RANK={found.rank} and WORLD_SIZE={found.world} are exported, but this command starts {ranks} ranks on this "
        "node only.",
        why="a launcher assigns ranks itself, so each node would silently train on its own",
        fix=f"{_multi_node_command(found, ranks, command)}\n"
        "       or, to train on this node only: unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT",
    )


def _multi_node_command(found: ExportedRank, ranks: int, command: Sequence[str]) -> str:
    # Multiples of the ranks per node count ranks; other numbers can only count nodes.
    counts_ranks = found.rank % ranks == 0 and found.world % ranks == 0
    node, nodes = (found.rank // ranks, found.world // ranks) if counts_ranks else (found.rank, found.world)
    host = f"[{found.host}]" if ":" in found.host else found.host
    options = ["--nodes", str(nodes), "--node-rank", str(node), "--master", f"{host}:{found.port}"]
    return shlex.join(["paceline", *command[:1], *options, *command[1:]])


def _torchrun(environment: Mapping[str, str]) -> NodeEnvironment | None:
    if not any(environment.get(name) for name in _TORCHRUN):
        return None
    text = environment.get("PET_NNODES") or "1"
    nodes, fix = NodeRange.match(text), "set a number, or MIN:MAX, e.g. 1:4"
    if nodes is None:
        raise WorldError("bad-environment", f"Invalid PET_NNODES: {text!r}.", fix=fix)
    host, port = environment.get("PET_MASTER_ADDR"), number(environment, "PET_MASTER_PORT", default=DEFAULT_PORT)
    if text := environment.get("PET_RDZV_ENDPOINT") or "":
        if (endpoint := Endpoint.match(text)) is None:
            raise WorldError("bad-environment", f"Invalid PET_RDZV_ENDPOINT: {text!r}.", fix="set HOST:PORT")
        host, port = endpoint
    rank = number(environment, "PET_NODE_RANK") if environment.get("PET_NODE_RANK") else None
    return NodeEnvironment(nodes, rank, host, port, _ranks(environment), "PET_* variables")


def _ranks(environment: Mapping[str, str]) -> int | None:
    """A number, or auto, gpu or cpu. None: one per GPU, which is the default."""
    text = environment.get("PET_NPROC_PER_NODE") or "auto"
    if text in ("auto", "gpu"):
        return None
    return os.cpu_count() or 1 if text == "cpu" else number(environment, "PET_NPROC_PER_NODE")


def _pytorch_job(environment: Mapping[str, str]) -> NodeEnvironment | None:
    """In a pod of Kubeflow's PyTorchJob, recognized by its name, RANK and WORLD_SIZE count pods."""
    if "KUBERNETES_SERVICE_HOST" not in environment or not _POD.fullmatch(environment.get("HOSTNAME", "")):
        return None
    found = read_exported(environment)
    if found is None:
        return None
    nodes = NodeRange(found.world, found.world)
    return NodeEnvironment(nodes, found.rank, found.host, found.port, None, "the PyTorchJob's RANK")


def _task(environment: Mapping[str, str]) -> NodeEnvironment | None:
    task = read_task(environment)
    if task is None:
        return None
    if task.world != task.nodes:
        raise LaunchError(
            "two-worlds",
            f"{task.starter} started {task.world} launchers on {plural(task.nodes, 'node')}.",
            why="a launcher starts all ranks of its node, so there must be one per node",
        )
    host, port = rendezvous_endpoint(environment) or task.rendezvous()
    return NodeEnvironment(NodeRange(task.nodes, task.nodes), task.rank, host, port, None, task.starter)


def _invalid(source: str, what: str) -> NoReturn:
    raise WorldError(
        "bad-environment",
        f"Invalid environment ({source}): {what}.",
        fix="unset these variables if you exported them, or pass --nodes, --node-rank and --master",
    )
