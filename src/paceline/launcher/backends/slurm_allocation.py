"""Launches inside a SLURM allocation, and requeues the job after a warning or a preemption.

In a batch script or a shell of salloc, `paceline launch` is the *front end*: it runs once and starts a launcher on each
node with srun. In a task of srun it is the launcher of one node (cluster/node_env.py). SLURM_STEP_ID tells the two
apart; SLURM_PROCID and SLURM_NODEID are 0 in a batch script, too.

Signals, as observed with SLURM 22.05 when the front end replaces the batch shell:

    before the time limit   SIGUSR2 to the front end only (`--signal=B:USR2@90`), within about 30 s
    at the time limit       SIGTERM to the front end and all launchers; SIGKILL after KillWait (30 s)
    scancel                 the same, immediately
    preemption, with grace  SIGTERM to the launchers only; after GraceTime the same as scancel, then SLURM requeues
    preemption, no grace    the same as scancel, then SLURM requeues
    scontrol requeue        the same as scancel, then SLURM requeues

Each is accompanied by a SIGCONT, and a launcher may receive SIGTERM twice. After SIGUSR2, and after a SIGTERM that only
the launchers received (`is_preempted`), ranks save and the front end requeues the job, because SLURM does not requeue a
job that exits within its grace time. The front end never requeues after receiving SIGTERM itself: that may be a
scancel. The requeued job has the same job id; SLURM_RESTART_COUNT counts the restarts.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.backends import slurm_job
from paceline.launcher.backends.subprocesses import RelayedProcess, SubprocessBackend
from paceline.launcher.cluster import frontend
from paceline.launcher.workload import Workload
from paceline.runtime.scheduler_env import SlurmAllocation, read_allocation

PATIENCE = 15.0  # seconds in which launchers may exit by themselves
_STEP = "--job-name="
_MESSAGES = tomllib.loads(Path(__file__).with_name("srun.toml").read_text(encoding="utf-8"))
_REFUSED = re.compile(rf"^srun: error: .*(?:{'|'.join(_MESSAGES['passing'])})", re.MULTILINE)
_TASK_KILLED = re.compile(r"^srun: error: \S+: task 0: (?:Killed|Terminated)$", re.MULTILINE)
_TASK_EXITED = re.compile(r"^srun: error: \S+: task 0: Exited with exit code", re.MULTILINE)


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Start a launcher on every node of the allocation, and requeue the job if necessary."""
    allocation = read_allocation(os.environ)
    assert allocation is not None
    ranks = spec.ranks or allocation.gpus
    if spec.dry_run:
        print(f"would start {ranks or 'default'} ranks on each of {', '.join(allocation.nodes)}")  # noqa: T201
        return 0
    backend = SlurmBackend(allocation, workdir=str(Path.cwd()))
    wanted = frontend.with_nodes(spec, len(allocation.nodes))
    if allocation.restarts:  # the job was requeued: resume its run
        wanted = replace(wanted, resume="auto", prior_starts=allocation.restarts)
    log.info(f"nodes: {len(allocation.nodes)} (SLURM job {allocation.job})")
    ended = frontend.launch_on(backend, workload, wanted, [ranks] * len(allocation.nodes), address=spec.address)
    warned = signal.SIGUSR2 in ended.signals
    terminated = bool({signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & ended.signals)
    if ended.status > 128 and wants_requeue(allocation, warned=warned, terminated=terminated):
        log.info(f"requeueing job {allocation.job}")
        slurm_job.requeue(allocation.job)
    return ended.status


def wants_requeue(allocation: SlurmAllocation, *, warned: bool, terminated: bool) -> bool:
    """Whether the front end must requeue the job after its ranks have saved. `warned`: it received SIGUSR2;
    `terminated`: it received SIGTERM, SIGINT or SIGHUP."""
    return not terminated and (warned or slurm_job.is_preempted(allocation.job))


def is_accident(reason: str) -> bool:
    """Whether srun exited because the launcher was killed, or because of what usually passes."""
    if _TASK_EXITED.search(reason):  # srun started it, and the launcher itself may have printed anything
        return False
    return bool(_TASK_KILLED.search(reason) or _REFUSED.search(reason))


class SlurmBackend(SubprocessBackend):
    """Starts each launcher as a job step with all resources of the job on its node, and ends no other step.

    A step is found by its name, which has a random token: launches in other processes, and on other nodes, may run
    steps in the same job. Only the launcher could tell the id of its step, as srun does not report it, and it may be
    lost before it connects.
    """

    def __init__(
        self, allocation: SlurmAllocation, *, workdir: str, command: Sequence[str] = (), patience: float = PATIENCE
    ) -> None:
        self._job = allocation.job
        self._workdir = workdir
        self._command = command or (sys.executable, "-P", "-m", "paceline", "node")
        super().__init__(allocation.nodes, self._argv, patience)

    def _argv(self, node: int) -> list[str]:
        return [
            "srun",
            f"--jobid={self._job}",
            f"{_STEP}paceline-{secrets.token_hex(8)}",
            "--nodes=1",
            "--ntasks=1",
            "--ntasks-per-node=1",
            f"--nodelist={self.names[node]}",
            "--overlap",  # with the step of a launcher that was just lost
            "--cpu-bind=none",
            "--mpi=none",
            "--export=ALL",
            "--unbuffered",
            "--kill-on-bad-exit=0",
            "--quiet",
            f"--chdir={self._workdir}",
            *self._command,
        ]

    def ended(self) -> dict[int, str]:
        before = dict(self._running)
        if exited := super().ended():
            self._meanwhile(self._end_steps, [before[node] for node in exited])
        return exited

    def is_accident(self, reason: str) -> bool:
        return super().is_accident(reason) or is_accident(reason)

    def _stop(self, processes: Sequence[RelayedProcess]) -> None:
        super()._stop(processes)
        self._end_steps(processes)

    def _end_steps(self, processes: Sequence[RelayedProcess]) -> None:
        """A killed srun leaves its step running, with its standard input open."""
        words = [word for each in processes if each.process.returncode != 0 for word in each.argv]
        names = [word.removeprefix(_STEP) for word in words if word.startswith(_STEP)]
        if names:
            with suppress(LaunchError):  # SLURM is not reachable, and ends them with the job
                slurm_job.end_steps(self._job, names)
