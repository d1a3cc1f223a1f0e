"""This process as a task of mpirun or srun, and the allocation of SLURM that it is in.

Like torchrun these start one process per rank, but they set variables of their own. They do not set a rendezvous; it
is derived from the job, so that all tasks derive the same one.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from paceline.config.launch import DEFAULT_PORT
from paceline.errors import WorldError
from paceline.runtime.network import LOOPBACK

# Below the ephemeral ports of Linux, which start at 32768.
_FIRST_PORT, _PORTS = 20_000, 10_000
# SLURM reserves step numbers from here on for its own use: the batch script, the shell of salloc.
_RESERVED_STEPS = 0xFFFFFFF0
MAX_HOSTS = 65_536  # as in SLURM
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # text and brackets up to the next comma outside of brackets
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


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
        port = _FIRST_PORT + zlib.crc32(self.job.encode()) % _PORTS if self.job else DEFAULT_PORT
        if self.nodes == 1:
            return LOOPBACK, port
        if self.hosts:
            return expand(self.hosts)[0], port
        raise WorldError(
            "no-rendezvous",
            f"Missing rendezvous address: {self.starter} started {self.world} ranks on several machines.",
            fix=f"mpirun -x MASTER_ADDR=HOST (Open MPI) or mpiexec -genv MASTER_ADDR HOST (MPICH, Intel MPI), where "
            f"HOST is the host of rank 0; the port is {DEFAULT_PORT} unless MASTER_PORT is set",
        )


def read_task(environment: Mapping[str, str]) -> SchedulerTask | None:
    """This process as a task of mpirun or srun; None if it is not one, or the only one.

    mpirun takes precedence: inside a SLURM job it starts its helpers with srun, whose variables its ranks inherit.
    """
    task = _mpi(environment) or _slurm(environment)
    if task is None or task.world == 1:
        return None
    if not (0 <= task.rank < task.world and 0 <= task.local_rank < task.local_world <= task.world):
        raise _inconsistent(
            f"The environment variables of {task.starter} are inconsistent: rank {task.rank} of {task.world}, "
            f"local rank {task.local_rank} of {task.local_world}."
        )
    return task


def _inconsistent(what: str) -> WorldError:
    return WorldError("bad-environment", what, fix="unset variables that were exported by hand")


def number(environment: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The integer in the first of these variables that is set."""
    name = next((name for name in names if name in environment), None)
    if name is None:
        if default is None:
            raise _missing(names[0])
        return default
    text = environment[name]
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise WorldError("bad-environment", f"Invalid environment variable {name}: expected an integer, got {text!r}.")
    return int(text)


def _missing(name: str) -> WorldError:
    return WorldError("bad-environment", f"Missing environment variable {name}: other variables of its kind are set.")


def _mpi(environment: Mapping[str, str]) -> SchedulerTask | None:
    """A rank of Open MPI, or of MPICH or Intel MPI. srun with MPI support sets PMI_RANK too, but no local rank."""
    if "OMPI_COMM_WORLD_RANK" in environment:
        starter = "mpirun"
        names = [f"OMPI_COMM_WORLD{part}" for part in ("_RANK", "_SIZE", "_LOCAL_RANK", "_LOCAL_SIZE")]
        job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
    elif "PMI_RANK" in environment and "MPI_LOCALRANKID" in environment:
        starter, job = "mpiexec", ""
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    else:
        return None
    rank, world, local_rank, local_world = (number(environment, name) for name in names)
    return SchedulerTask(starter, rank, world, local_rank, local_world, -(-world // max(1, local_world)), job)


def _slurm(environment: Mapping[str, str]) -> SchedulerTask | None:
    if not _is_srun_task(environment):
        return None
    world = number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    tasks = expand_counts(_first(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = number(environment, "SLURM_NODEID")
    if not (sum(tasks) == world and node < len(tasks)):
        raise _inconsistent(
            f"The environment variables of SLURM are inconsistent: {world} tasks, {tasks} per node, node {node}."
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

    A batch script and the shells of salloc and `srun --pty` have most of the same variables, but what a person starts
    in them is a single process, even if SLURM_NTASKS is 8.
    """
    step = environment.get("SLURM_STEP_ID", "")
    is_step = re.fullmatch(r"[0-9]{1,10}", step) is not None and int(step) < _RESERVED_STEPS
    return is_step and "SLURM_PTY_PORT" not in environment


def _first(environment: Mapping[str, str], *names: str) -> str:
    found = next((environment[name] for name in names if environment.get(name)), None)
    if found is None:
        raise _missing(names[0])
    return found


@dataclass(frozen=True)
class SlurmAllocation:
    """The allocation of the SLURM job that this process belongs to."""

    job: str
    nodes: tuple[str, ...]
    is_front_end: bool  # a launcher in this process starts the launchers of all nodes
    gpus: int | None = None  # per node, if SLURM manages them
    restarts: int = 0  # how many times the job was requeued


def read_allocation(environment: Mapping[str, str]) -> SlurmAllocation | None:
    """The allocation of this process, if any."""
    job = environment.get("SLURM_JOB_ID", "")
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    if not re.fullmatch(r"[0-9]+", job) or not nodes:
        return None
    gpus = environment.get("SLURM_GPUS_ON_NODE") or environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    hosts = tuple(expand(nodes))
    # A batch script is a front end even on a single node: it receives SLURM's signals and is requeued. The shell of
    # salloc on a single node is interactive.
    has_front_end = len(hosts) > 1 or "SLURM_PROCID" in environment
    return SlurmAllocation(
        job=job,
        nodes=hosts,
        is_front_end=has_front_end and not _is_srun_task(environment),
        gpus=int(gpus) if re.fullmatch(r"[0-9]{1,4}", gpus) else None,
        restarts=int(restarts) if re.fullmatch(r"[0-9]{1,10}", restarts) else 0,
    )


def expand(text: str) -> list[str]:
    """The host names in a list, in order."""
    text, names = text.strip(), list[str]()
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise _invalid(text, "unexpected comma or bracket")
    for item in items:
        names += _expand_item(item, text)
        _check_size(len(names), text)
    return names


def expand_counts(text: str) -> list[int]:
    """One number per host, as in SLURM_TASKS_PER_NODE: `4(x2),1` is 4, 4, 1."""
    counts: list[int] = []
    for item in text.strip().split(","):
        found = _COUNT.fullmatch(item)
        if found is None:
            raise _invalid(text, f"invalid count {item!r}")
        times = int(found[2] or 1)
        _check_size(len(counts) + times, text)
        counts += [int(found[1])] * times
    return counts


def _expand_item(item: str, text: str) -> list[str]:
    """`rack[1-2]n[1-3]`: the product of its parts."""
    parts = [_expand_ranges(found[1], text) if found[2] is None else [found[2]] for found in _PART.finditer(item)]
    _check_size(math.prod(map(len, parts)), text)
    names = ["".join(chosen) for chosen in product(*parts)]
    if not _NAME.fullmatch(names[0]) or len(names[-1]) > 253:
        raise _invalid(text, f"invalid host name {names[0]!r}")
    return names


def _expand_ranges(ranges: str, text: str) -> list[str]:
    """`01-03,7` is 01, 02, 03, 7: all numbers have the width of the first."""
    numbers: list[str] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _invalid(text, f"invalid range {part!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < first + MAX_HOSTS:
            raise _invalid(text, f"range {part} is descending or too long")
        numbers += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
        _check_size(len(numbers), text)
    return numbers


def _check_size(hosts: int, text: str) -> None:
    if hosts > MAX_HOSTS:
        raise _invalid(text, f"more than {MAX_HOSTS:,} hosts")


def _invalid(text: str, why: str) -> WorldError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return WorldError(
        "bad-environment",
        f"Invalid SLURM host list: {shown!r}.",
        why=why,
        fix="expected the form node[01-03,7],gpu-a; unset variables of SLURM that were exported by hand",
    )
