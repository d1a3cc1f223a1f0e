"""Inside an allocation of SLURM: which nodes there are, how to start a launcher on each, and what its signals mean.

`paceline launch` can find itself in two places. In a batch script or a shell of salloc it is the *front end*: it runs
once, and starts a launcher on each node with srun. In a task of srun it is itself the launcher of one node, next to
the others (cluster/node_env.py). The two differ in SLURM_STEP_ID; SLURM_PROCID and SLURM_NODEID are 0 in a batch script
as well.

Who hears what (seen with SLURM 22.05, where the front end takes the place of the batch shell):

    before the time limit   SIGUSR2 to the front end alone (`--signal=B:USR2@90`), give or take half a minute
    at the time limit       SIGTERM to the front end and every node's launcher; SIGKILL after KillWait (30 s)
    scancel                 the same, at once
    preemption, with grace  SIGTERM to the nodes' launchers alone; after GraceTime as with scancel, then SLURM requeues
    preemption, no grace    as with scancel, then SLURM requeues
    scontrol requeue        as with scancel, then SLURM requeues

A SIGCONT comes along with each, and a launcher may get its SIGTERM twice. So: after SIGUSR2, and after a SIGTERM that
only the launchers got (`is_preempted`), the ranks save, and the front end requeues the job itself: one that ends within
its grace time is requeued by nobody else. After a SIGTERM to the front end it never does: that may be a scancel, and
would be undone. The next start has the same job id, and SLURM_RESTART_COUNT counts it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.backends import slurm_job
from paceline.launcher.backends.subprocesses import SubprocessBackend
from paceline.launcher.cluster import frontend
from paceline.launcher.workload import Workload
from paceline.runtime.scheduler_env import SlurmAllocation, read_allocation

PATIENCE = 15.0  # seconds that launchers get to end by themselves once the front end lets go


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Start a launcher on every node of the allocation; put the job back into the queue where that is our part."""
    allocation = read_allocation(os.environ)
    assert allocation is not None
    backend = SlurmBackend(allocation, workdir=str(Path.cwd()))
    ranks = spec.ranks or allocation.gpus
    wanted = frontend.with_nodes(spec, len(allocation.nodes))
    if allocation.restarts:  # the job was requeued: it goes on with its own run
        wanted = replace(wanted, resume="auto", prior_starts=allocation.restarts)
    log.info(f"nodes: {len(allocation.nodes)} of SLURM's job {allocation.job}")
    ended = frontend.launch_on(backend, workload, wanted, [ranks] * len(allocation.nodes), address=spec.address)
    warned = signal.SIGUSR2 in ended.signals
    told_to_end = bool({signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & ended.signals)
    if ended.status > 128 and wants_requeue(allocation, warned=warned, told_to_end=told_to_end):
        log.info(f"job {allocation.job} goes back into the queue")
        slurm_job.requeue(allocation.job)
    return ended.status


def wants_requeue(allocation: SlurmAllocation, *, warned: bool, told_to_end: bool) -> bool:
    """Whether the front end, once its ranks saved and ended, has to requeue the job: `warned` is a SIGUSR2 that it got,
    `told_to_end` a SIGTERM, SIGINT or SIGHUP."""
    return not told_to_end and (warned or slurm_job.is_preempted(allocation.job))


class SlurmBackend(SubprocessBackend):
    """The nodes of an allocation. Each launcher is a step of the job, with all that the job has on its node."""

    def __init__(
        self, allocation: SlurmAllocation, *, workdir: str, command: Sequence[str] = (), patience: float = PATIENCE
    ) -> None:
        self._job = allocation.job
        self._workdir = workdir
        self._command = command or (sys.executable, "-P", "-m", "paceline", "node")
        self._starts = 0
        self._steps: dict[int, str] = {}  # names, by node
        super().__init__(allocation.nodes, self._argv, patience)

    def _argv(self, node: int) -> list[str]:
        self._starts += 1
        self._steps[node] = f"paceline-{node}-{self._starts}"
        return [
            "srun",
            f"--jobid={self._job}",
            f"--job-name={self._steps[node]}",
            "--nodes=1",
            "--ntasks=1",
            "--ntasks-per-node=1",
            f"--nodelist={self.names[node]}",
            "--overlap",  # with the step of a launcher that was just lost, and its GPUs
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
        gone = super().ended()
        self._end_steps([self._steps.pop(node) for node in gone])
        return gone

    def stop(self) -> None:
        super().stop()
        self._end_steps(list(self._steps.values()))
        self._steps.clear()

    def _end_steps(self, names: Sequence[str]) -> None:
        """A killed srun leaves its step running, deaf: its standard input does not end."""
        if names:
            with suppress(LaunchError):  # SLURM is away, and ends them together with the job
                slurm_job.end_steps(self._job, names)
