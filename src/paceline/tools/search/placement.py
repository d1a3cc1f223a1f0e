"""Where trials run: each takes its ranks from a pool of machines, and no GPU is given to two of them.

    this machine          a GPU per rank; without GPUs, as many trials at a time as `parallel` says
    --hosts a:4,b:4       ranks of these hosts
    a SLURM allocation    GPUs of its nodes; without GPUs, one trial at a time on a node
    --ray auto            a placement group of each trial: Ray finds the machine

A trial runs on one machine if its ranks fit, and otherwise on several whole ones. Its process is a launcher, forked
from the sweep, which has imported torch already. It is in a session of its own, so that Ctrl-C reaches the sweep only,
and gets SIGTERM if the sweep dies: its ranks then save a checkpoint. It holds a lock that forked ranks inherit, so the
lock is free when all of them have exited.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.config.launch import LaunchSpec, NodeRange
from paceline.config.sections import SweepSection
from paceline.errors import PacelineError, SearchError
from paceline.launcher.backends.ssh import read_hosts
from paceline.launcher.workload import usable_gpus
from paceline.run import regular_files
from paceline.runtime.processes import prctl, run_forked
from paceline.runtime.scheduler_env import read_allocation

_HERE = ""  # the name of this machine
_PR_SET_PDEATHSIG = 1  # Linux prctl
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a filesystem


@dataclass(frozen=True)
class Machine:
    """A machine with a place for each rank. Places are the GPUs that CUDA_VISIBLE_DEVICES names, if there are any."""

    name: str
    places: tuple[str, ...]  # a GPU that trials share is there more than once
    has_gpus: bool = False

    @property
    def size(self) -> int:
        """How many ranks of one trial fit: ranks do not share a GPU."""
        return len(set(self.places))


@dataclass(frozen=True)
class TrialSlot:
    """The places of a trial."""

    taken: tuple[tuple[Machine, tuple[int, ...]], ...]  # with the indices of places
    kind: str = "here"  # or hosts, slurm, ray

    def __str__(self) -> str:
        parts = []
        for machine, indices in self.taken:
            gpus = f"GPU {','.join(machine.places[index] for index in indices)}" if machine.has_gpus else ""
            parts.append(" ".join(part for part in (machine.name, gpus) if part) or "this machine")
        return "; ".join(parts)

    @property
    def node_env(self) -> dict[str, str]:
        """Variables of the launcher of this trial: a part of the allocation is all that it sees."""
        if self.kind != "slurm":
            return {}
        names = ",".join(machine.name for machine, _ in self.taken)
        nodes = str(len(self.taken))
        return {"SLURM_JOB_NODELIST": names, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NNODES": nodes, "SLURM_PROCID": "0"}

    def options(self, spec: LaunchSpec) -> LaunchSpec:
        """The spec of a launch on these places."""
        machine, indices = self.taken[0]
        ranks = len(indices)
        env = dict(spec.env)
        if machine.has_gpus and len(self.taken) == 1:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(machine.places[index] for index in indices)
        if self.kind == "hosts":
            hosts = ",".join(f"{machine.name}:{len(indices)}" for machine, indices in self.taken)
            return replace(spec, hosts=hosts, ranks=None, env=env)
        if self.kind == "ray":
            return replace(spec, ranks=ranks, nodes=NodeRange(1, 1), env=env)
        return replace(spec, ranks=ranks, env=env)


@dataclass
class Pool:
    """The places of all machines."""

    machines: Sequence[Machine]
    ranks: int  # of a trial
    parallel: int  # trials at a time, at most; then as many of these as there is room for
    kind: str = "here"
    _free: dict[int, list[int]] = field(default_factory=dict)  # by machine
    _running: int = 0

    def __post_init__(self) -> None:
        self._free = {number: list(range(len(each.places))) for number, each in enumerate(self.machines)}
        self.parallel = self._capacity()
        if not self.parallel:
            largest = max((each.size for each in self.machines), default=0)
            raise SearchError(
                "no-room",
                f"A trial has {self.ranks} ranks, but there are {sum(each.size for each in self.machines)} "
                f"places on {len(self.machines)} machines, at most {largest} on one.",
            )

    @property
    def has_room(self) -> bool:
        return self._running < self.parallel and self._find() is not None

    def take(self) -> TrialSlot | None:
        """Places for a trial; None if there are none now."""
        found = self._find() if self.has_room else None
        if found is None:
            return None
        self._running += 1
        taken = []
        for number, indices in found.items():
            self._free[number] = [index for index in self._free[number] if index not in indices]
            taken.append((self.machines[number], tuple(indices)))
        return TrialSlot(tuple(taken), self.kind)

    def give_back(self, slot: TrialSlot) -> None:
        self.rest(slot)
        self.wake(slot)

    def rest(self, slot: TrialSlot) -> None:
        self._running -= 1  # its trial has ended, but no other gets these places until they wake

    def wake(self, slot: TrialSlot) -> None:
        for machine, indices in slot.taken:
            number = next(index for index, each in enumerate(self.machines) if each is machine)
            self._free[number] = sorted([*self._free[number], *indices])

    def _capacity(self) -> int:
        """How many trials run at a time."""
        slots: list[TrialSlot] = []
        while (slot := self.take()) is not None:
            slots.append(slot)
        for each in slots:
            self.give_back(each)
        return len(slots)

    def _find(self) -> dict[int, list[int]] | None:
        """By machine, the places of a trial: on the fullest machine that has room, or on whole ones."""
        sizes = [each.size for each in self.machines]
        fitting = [number for number, free in self._free.items() if min(len(free), sizes[number]) >= self.ranks]
        if fitting:
            number = min(fitting, key=lambda each: (len(self._free[each]), each))
            return {number: self._free[number][: self.ranks]}
        if max(sizes, default=0) >= self.ranks:
            return None
        found: dict[int, list[int]] = {}
        for number, free in self._free.items():
            missing = self.ranks - sum(map(len, found.values()))
            if missing and len(free) >= sizes[number] <= missing:
                found[number] = free[: sizes[number]]
        return found if sum(map(len, found.values())) == self.ranks else None


def open_pool(spec: LaunchSpec, section: SweepSection, environment: Mapping[str, str] = os.environ) -> Pool:
    """The pool that the options of a launch describe. `spec.ranks` are those of a trial."""
    ranks = spec.ranks or 1
    may_have_gpus = str(spec.device) != "cpu"
    if spec.hosts:
        named = read_hosts(spec.hosts)
        hosts = [Machine(each.name, _places(each.ranks or ranks), has_gpus=may_have_gpus) for each in named]
        return _pool(hosts, ranks, section, "hosts")
    if spec.ray:
        return Pool([Machine("Ray", _places(ranks * (section.parallel or 1)))], ranks, section.parallel or 1, "ray")
    allocation = read_allocation(environment)
    # A task of srun is on one node already, and its trials start there.
    if allocation is not None and allocation.is_front_end and len(allocation.nodes) > 1:
        has_gpus = may_have_gpus and bool(allocation.gpus)
        per_node = (allocation.gpus or ranks) if has_gpus else ranks
        nodes = [Machine(name, _places(per_node), has_gpus=has_gpus) for name in allocation.nodes]
        return _pool(nodes, ranks, section, "slurm")
    if visible := _visible_gpus(environment) if may_have_gpus else ():
        return _pool([Machine(_HERE, tuple(visible), has_gpus=True)], ranks, section, "here")
    parallel = section.parallel or 1
    return Pool([Machine(_HERE, _places(ranks * parallel))], ranks, parallel)


def _pool(machines: Sequence[Machine], ranks: int, section: SweepSection, kind: str) -> Pool:
    shared = [replace(each, places=each.places * section.per_gpu) for each in machines]
    return Pool(shared, ranks, section.parallel or sum(len(each.places) for each in shared), kind)


def _places(number: int) -> tuple[str, ...]:
    return tuple(map(str, range(number)))


def _visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """As they are named in CUDA_VISIBLE_DEVICES. Does not initialize CUDA."""
    number = len(usable_gpus(None))  # `device` has been asked about
    named = [each.strip() for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    return named[:number] if named else list(map(str, range(number)))


@dataclass
class TrialProcess:
    """A running trial."""

    pid: int
    began: float = field(default_factory=time.monotonic)
    status: int | None = None  # as the shell would have it: 128 + number after a signal

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code
        return self.status

    def send(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)  # not waited for, so it is still the number of this process


def is_free(lock: Path) -> bool:
    """Whether no process of an earlier start of a trial is left on this machine."""
    descriptor = regular_files.open_descriptor(lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_LOCKS
    finally:
        os.close(descriptor)
    return True


def start(body: Callable[[], int], *, output: Path, lock: Path, env: Mapping[str, str]) -> TrialProcess:
    """Run `body` in a new process, which exits with what it returns."""
    sweep = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    def trial() -> int:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != sweep:
            return 128 + signal.SIGTERM
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)  # until the last process of this trial has exited
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        _direct_streams(output)
        os.environ.update(env)
        return _status_of(body)

    process = run_forked(trial)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return TrialProcess(process)


def _status_of(body: Callable[[], int]) -> int:
    """What it returns, or the exit status after an exception."""
    try:
        return body()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _direct_streams(output: Path) -> None:
    log = regular_files.open_descriptor(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in ((0, null), (1, log), (2, log)):
        os.dup2(descriptor, number)
    for descriptor in (null, log):
        if descriptor > 2:
            os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
