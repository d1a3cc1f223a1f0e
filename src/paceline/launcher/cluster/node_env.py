"""What an environment says of this launcher's place among several.

Operators and schedulers that start one command on each machine tell it in variables how many machines there are,
which of them this is and where they meet. Four ways of saying so are understood:

    PET_NNODES, PET_NODE_RANK, …        torchrun's own, set by Kubeflow's TrainJob and newer PyTorchJobs
    RANK, WORLD_SIZE in a PyTorchJob    older ones; here they count pods, not ranks
    one task of srun on each machine    SLURM_PROCID, …
    one process of mpirun on each       OMPI_COMM_WORLD_RANK, …, PMI_RANK, …

Some guides have people export RANK as the first rank of a machine, and WORLD_SIZE as all ranks. With
`paceline.launch(fn, ranks=4)` that is understood; under `paceline launch`, which numbers ranks itself, each machine
would train alone without a word, so it is refused.
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
_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]{0,252}")  # a name or an address
_POD = re.compile(r".*-(?:master|worker)-[0-9]+")


@dataclass(frozen=True)
class NodeEnvironment:
    """This launcher's place among several. What a person says on the command line counts more."""

    nodes_min: int
    nodes_max: int
    node_rank: int | None  # None: not said, any will do
    master_host: str | None  # None: not said
    master_port: int
    ranks: int | None  # on this machine; None: not said, or one for each GPU
    source: str  # for people: where all this was found

    def __post_init__(self) -> None:
        if not 1 <= self.nodes_min <= self.nodes_max or not 0 <= (self.node_rank or 0) < self.nodes_max:
            _refuse(self.source, f"{self._range()} nodes, this being number {self.node_rank}")
        if self.master_host is not None and not _HOST.fullmatch(self.master_host):
            _refuse(self.source, f"the nodes meet at {self.master_host!a}, which is no name of a machine")
        if not 0 < self.master_port < 65536:
            _refuse(self.source, f"the nodes meet at port {self.master_port}")
        if self.ranks == 0:
            _refuse(self.source, "no ranks on this machine")

    def words(self) -> str:
        """nodes: 2, this is node 1 (from PET_* variables)"""
        which = "" if self.node_rank is None else f", this is node {self.node_rank}"
        return f"nodes: {self._range()}{which} (from {self.source})"

    def endpoint(self) -> Endpoint:
        """For several nodes, which need one."""
        if self.master_host is None:
            raise LaunchError(
                "no-master",
                f"The environment ({self.source}) speaks of {self.nodes_max} nodes, but not of where they meet.",
                fix="--master HOST:29500, HOST being the first one's name or address",
            )
        return Endpoint(self.master_host, self.master_port)

    def _range(self) -> str:
        return str(NodeRange(self.nodes_min, self.nodes_max))


def read_node_environment(environment: Mapping[str, str] = os.environ) -> NodeEnvironment | None:
    """The contract that this process was started under, if any. For a launcher that was told no number of nodes."""
    if is_rank(environment):
        return None  # a rank inherits what its launcher was told
    return _torchrun(environment) or _pytorch_job(environment) or _task(environment)


def first_rank_environment(environment: Mapping[str, str], ranks: int) -> NodeEnvironment | None:
    """An exported RANK understood as the first of this machine's `ranks` ranks, of WORLD_SIZE on all machines."""
    found = read_exported(environment)
    if found is None or found.world == 1 or (found.rank, found.world) == (0, ranks):
        return None
    if found.rank % ranks or found.world % ranks:
        raise LaunchError(
            "first-rank",
            f"RANK is {found.rank} and WORLD_SIZE is {found.world}, but this machine is to have {ranks} ranks.",
            why="exported beside launch(), RANK is a machine's first rank and WORLD_SIZE the ranks of all machines, so "
            f"both are multiples of {ranks}",
            fix=f"on machine I of N: export RANK=I×{ranks} WORLD_SIZE=N×{ranks}; on one machine: unset both",
        )
    nodes = found.world // ranks
    return NodeEnvironment(nodes, nodes, found.rank // ranks, found.host, found.port, ranks, "RANK, as a first rank")


def refuse_two_worlds(environment: Mapping[str, str], ranks: int, command: Sequence[str]) -> None:
    """Under `paceline launch` without a number of nodes: an exported RANK says that there are other machines.

    `command` is what was typed behind `paceline`: the verb, then its options, then the rest.
    """
    found = read_exported(environment)
    if found is None or found.world == 1 or (found.rank, found.world) == (0, ranks):
        return
    if read_node_environment(environment) is not None:
        return
    raise LaunchError(
        "two-worlds",
        f"RANK={found.rank} and WORLD_SIZE={found.world} are exported, but this command starts a world of {ranks} "
        "on this machine alone.",
        why="a launcher numbers its ranks itself, so each machine would train for itself, and none would say so",
        fix=f"{_right_command(found, ranks, command)}\n"
        "       or, to train on this machine alone: unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT",
    )


def _right_command(found: ExportedRank, ranks: int, command: Sequence[str]) -> str:
    # Multiples of the machine's ranks count ranks, anything else can only count machines.
    counts_ranks = found.rank % ranks == 0 and found.world % ranks == 0
    node, nodes = (found.rank // ranks, found.world // ranks) if counts_ranks else (found.rank, found.world)
    host = f"[{found.host}]" if ":" in found.host else found.host
    options = ["--nodes", str(nodes), "--node-rank", str(node), "--master", f"{host}:{found.port}"]
    return shlex.join(["paceline", *command[:1], *options, *command[1:]])


def _torchrun(environment: Mapping[str, str]) -> NodeEnvironment | None:
    if not any(environment.get(name) for name in _TORCHRUN):
        return None
    least, most = _nodes(environment.get("PET_NNODES") or "1")
    host, port = environment.get("PET_MASTER_ADDR"), number(environment, "PET_MASTER_PORT", default=DEFAULT_PORT)
    if endpoint := environment.get("PET_RDZV_ENDPOINT"):
        host, port = _endpoint(endpoint)
    rank = number(environment, "PET_NODE_RANK") if environment.get("PET_NODE_RANK") else None
    return NodeEnvironment(least, most, rank, host, port, _ranks(environment), "PET_* variables")


def _nodes(text: str) -> NodeRange:
    found = NodeRange.match(text)
    if found is None:
        raise WorldError("bad-environment", f"PET_NNODES is {text!r}.", fix="give a number, or least:most, as 1:4")
    return found


def _endpoint(text: str) -> Endpoint:
    found = Endpoint.match(text)
    if found is None:
        raise WorldError("bad-environment", f"PET_RDZV_ENDPOINT is {text!r}.", fix="give host:port")
    return found


def _ranks(environment: Mapping[str, str]) -> int | None:
    """torchrun's words for a number: those that mean the GPUs are what is chosen anyway."""
    text = environment.get("PET_NPROC_PER_NODE") or "auto"
    if text in ("auto", "gpu"):
        return None
    return os.cpu_count() or 1 if text == "cpu" else number(environment, "PET_NPROC_PER_NODE")


def _pytorch_job(environment: Mapping[str, str]) -> NodeEnvironment | None:
    """A pod of Kubeflow's PyTorchJob is told by its name; there RANK and WORLD_SIZE count pods."""
    if "KUBERNETES_SERVICE_HOST" not in environment or not _POD.fullmatch(environment.get("HOSTNAME", "")):
        return None
    found = read_exported(environment)
    if found is None:
        return None
    return NodeEnvironment(found.world, found.world, found.rank, found.host, found.port, None, "the PyTorchJob's RANK")


def _task(environment: Mapping[str, str]) -> NodeEnvironment | None:
    task = read_task(environment)
    if task is None:
        return None
    if task.world != task.nodes:
        raise LaunchError(
            "two-worlds",
            f"{task.starter} started {task.world} launchers on {plural(task.nodes, 'machine')}.",
            why="a launcher starts all ranks of its machine, so each machine has one",
            fix="leave `paceline launch` out (srun python train.py, mpirun python train.py), or start one on each "
            "machine: srun --ntasks-per-node=1 (mpirun --map-by ppr:1:node) paceline launch train.py",
        )
    host, port = rendezvous_endpoint(environment) or task.rendezvous()
    return NodeEnvironment(task.nodes, task.nodes, task.rank, host, port, None, task.starter)


def _refuse(source: str, what: str) -> NoReturn:
    raise WorldError(
        "bad-environment",
        f"The environment ({source}) says: {what}.",
        why="that does not make sense",
        fix="unset these variables where they were exported by hand; --nodes, --node-rank and --master count more",
    )
