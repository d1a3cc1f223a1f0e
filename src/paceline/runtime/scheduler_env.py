"""This process as a task of mpirun or srun, and the allocation of SLURM that it is in.

Like torchrun these start one process per rank, but they set variables of their own. They do not set a rendezvous; it
is derived from the job, so that all tasks derive the same one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.launch import DEFAULT_PORT
from paceline.errors import WorldError
from paceline.runtime.hostlist import expand, expand_counts

LOOPBACK = "127.0.0.1"

# Below the ephemeral ports of Linux, which start at 32768.
_FIRST_PORT, _PORTS = 20_000, 10_000
# SLURM reserves step numbers from here on for its own use: the batch script, the shell of salloc.
_RESERVED_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class SchedulerTask:
    """One of at least two processes started by one command."""

    starter: str  # the command, for display
    rank: int
    world: int
    local_rank: int
    local_world: int
    nodes: int
    job: str  # distinguishes jobs on the same machine; "" if unknown
    hosts: str = ""  # in the notation of SLURM

    def rendezvous(self) -> tuple[str, int]:
        """The default host and port of the rendezvous."""
        if self.nodes == 1:
            return LOOPBACK, self._port()
        if self.hosts:
            return expand(self.hosts)[0], self._port()
        raise WorldError(
            "no-rendezvous",
            f"{self.starter} started {self.world} ranks on several machines, and nothing says where they meet.",
            why="its variables do not name the machine of rank 0",
            fix=f"mpirun -x MASTER_ADDR=HOST (Open MPI) or mpiexec -genv MASTER_ADDR HOST (MPICH, Intel MPI), where "
            f"HOST is the machine of rank 0; the port is {DEFAULT_PORT} unless MASTER_PORT says otherwise",
        )

    def _port(self) -> int:
        return _FIRST_PORT + zlib.crc32(self.job.encode()) % _PORTS if self.job else DEFAULT_PORT


def read_task(environment: Mapping[str, str]) -> SchedulerTask | None:
    """The task of mpirun or srun that this process is; None if there is none, or only one.

    mpirun takes precedence: inside a SLURM job it starts its helpers with srun, whose variables its ranks inherit.
    """
    task = _open_mpi(environment) or _hydra(environment) or _slurm(environment)
    if task is None or task.world == 1:
        return None
    if not (0 <= task.rank < task.world and 0 <= task.local_rank < task.local_world <= task.world):
        raise WorldError(
            "bad-environment",
            f"The variables of {task.starter} say: rank {task.rank} of {task.world}, "
            f"on its machine {task.local_rank} of {task.local_world}.",
            why="ranks count from 0, and a machine has no more of them than all together",
            fix="unset those that were exported by hand",
        )
    return task


def number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The integer in the first of these variables that is set."""
    name = next((name for name in names if name in environment), None)
    if name is None and default is not None:
        return default
    text = environment.get(name or names[0])
    if text is None:
        raise WorldError("bad-environment", f"The environment variable {names[0]} is missing beside its siblings.")
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise WorldError("bad-environment", f"The environment variable {name} is {text!r}, not a whole number.")
    return int(text)


def _open_mpi(environment: Mapping[str, str]) -> SchedulerTask | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
    rank, world = number(environment, "OMPI_COMM_WORLD_RANK"), number(environment, "OMPI_COMM_WORLD_SIZE")
    local_rank = number(environment, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_world = number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _mpi("mpirun", rank, world, local_rank, local_world, job)


def _hydra(environment: Mapping[str, str]) -> SchedulerTask | None:
    """MPICH and Intel MPI. srun with MPI support sets PMI_RANK too, but no local rank."""
    if "PMI_RANK" not in environment or "MPI_LOCALRANKID" not in environment:
        return None
    rank, world, local_rank, local_world = (
        number(environment, name) for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    )
    return _mpi("mpiexec", rank, world, local_rank, local_world, job="")


def _mpi(starter: str, rank: int, world: int, local_rank: int, local_world: int, job: str) -> SchedulerTask:
    nodes = -(-world // max(1, local_world))
    return SchedulerTask(starter, rank, world, local_rank, local_world, nodes, job)


def _slurm(environment: Mapping[str, str]) -> SchedulerTask | None:
    """A task of srun."""
    if not _is_srun_task(environment):
        return None
    world = number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    tasks = expand_counts(_first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = number(environment, "SLURM_NODEID")
    if not (sum(tasks) == world and node < len(tasks)):
        raise WorldError(
            "bad-environment",
            f"SLURM's variables say: {world} tasks, {tasks} of them on each node, and this is node {node}.",
            fix="unset those that were exported by hand",
        )
    return SchedulerTask(
        "srun",
        rank=number(environment, "SLURM_PROCID"),
        world=world,
        local_rank=number(environment, "SLURM_LOCALID"),
        local_world=tasks[node],
        nodes=len(tasks),
        job=f"{_first(environment, 'SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}",
        hosts=_first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    )


def _is_srun_task(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process.

    A batch script, salloc's shell and a shell under `srun --pty` have most of the same variables, and SLURM_NTASKS may
    be 8 there; but what a person starts in them is one process.
    """
    step = environment.get("SLURM_STEP_ID", "")
    is_step = re.fullmatch(r"[0-9]{1,10}", step) is not None and int(step) < _RESERVED_STEPS
    return is_step and "SLURM_PTY_PORT" not in environment


def _first(environment: Mapping[str, str], *names: str) -> str:
    found = next((environment[name] for name in names if environment.get(name)), None)
    if found is None:
        raise WorldError("bad-environment", f"The environment variable {names[0]} is missing beside its siblings.")
    return found


@dataclass(frozen=True)
class SlurmAllocation:
    """What SLURM gave to the job that this process belongs to."""

    job: str
    nodes: tuple[str, ...]
    is_front_end: bool  # a launcher in this process starts those of all nodes
    gpus: int | None = None  # for each node, where SLURM counts them
    restarts: int = 0  # how often the job was requeued


def read_allocation(environment: Mapping[str, str]) -> SlurmAllocation | None:
    """The allocation that this process is in, if any."""
    job = environment.get("SLURM_JOB_ID", "")
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not re.fullmatch(r"[0-9]+", job) or not nodes:
        return None
    gpus = environment.get("SLURM_GPUS_ON_NODE") or environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    hosts = tuple(expand(nodes))
    # A batch script is a front end on a single node too: it hears SLURM's warnings, and goes back into the queue. In a
    # shell of salloc on one node a person is at the keyboard.
    has_front_end = len(hosts) > 1 or "SLURM_PROCID" in environment
    return SlurmAllocation(
        job=job,
        nodes=hosts,
        is_front_end=has_front_end and not _is_srun_task(environment),
        gpus=int(gpus) if re.fullmatch(r"[0-9]{1,4}", gpus) else None,
        restarts=int(restarts) if re.fullmatch(r"[0-9]{1,10}", restarts) else 0,
    )
