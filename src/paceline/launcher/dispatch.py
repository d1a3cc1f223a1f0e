"""One command, anywhere: which of the ways of launching was asked for, or is where this process finds itself.

--hosts                    ssh.py            this process is the front end
--ray                      ray_cluster.py    this process is the front end
--slurm                    slurm_script.py   a batch script is submitted, and followed
in a SLURM allocation      slurm.py          this process is the front end
--nodes, --master          by_hand.py        one of several launchers that people started
PET_*, srun, mpirun        contract.py       one of several launchers that something else started
nothing of all that        one_node.py
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launcher.backends import slurm_allocation
from paceline.launcher.cluster import node_env
from paceline.launcher.launch import Launch, prepare_environment
from paceline.launcher.local.single_node import launch_single_node
from paceline.launcher.rank_count import choose_ranks
from paceline.launcher.workload import Workload
from paceline.runtime.environment import read_exported

PORT = 29500  # where launchers meet unless it is said
_LOGS = Path("runs")


@dataclass(frozen=True)
class Where:
    """What was asked for, in the words of the command line and of a recipe's `launch:`."""

    nodes: str | None = None  # a number, or the fewest and the most: 1:4
    node_rank: int | None = None
    master: str | None = None  # host or host:port
    hosts: str | None = None
    ssh: str | None = None  # the program, with options
    python: str | None = None  # the interpreter on the other machines
    address: str | None = None  # of this machine, as the others reach it
    slurm: str | None = None
    ray: str | None = None
    dry_run: bool = False
    k8s: bool = False
    k8s_with: str | None = None
    rendezvous: str | None = None  # in torchrun's words: whether nodes say their number


def dispatch(work: Workload, launch: Launch, where: Where, command: Sequence[str]) -> int:
    """The exit status for the shell. `command` is what the person typed behind `paceline`."""
    _refuse_several_ways(where)
    _refuse_bad_variables(launch.env or {})
    if where.k8s or where.k8s_with:
        return _for_kubernetes(work, launch, where, command)
    inside = slurm_allocation.allocation(os.environ)
    if where.hosts:
        return _over_ssh(work, launch, where)
    if where.ray:
        return _on_ray(work, launch, where)
    if where.slurm and (inside is None or where.dry_run):
        return _submit(work, launch, where, command)
    if inside is not None and where.master is None and _is_front_end(inside):
        return _in_allocation(work, launch, where, inside)
    found = node_env.read_node_environment(os.environ) if where.master is None else None
    if found is not None and found.nodes_max > 1:
        return _under_contract(work, launch, where, found)
    if where.nodes is None and where.master is None and where.node_rank is None:
        wanted = launch if launch.ranks is not None or found is None else replace(launch, ranks=found.ranks)
        if read_exported(os.environ) is not None:
            prepare_environment(wanted)
            ranks, _ = choose_ranks(wanted.ranks, device=wanted.device, on_cpu=wanted.on_cpu)
            node_env.refuse_two_worlds(os.environ, ranks, command)
        return launch_single_node(work, wanted)
    nodes = _nodes(where.nodes or "1")
    if where.node_rank is not None and where.node_rank >= nodes[1]:
        raise LaunchError(
            "bad-number",
            f"--node-rank {where.node_rank} is not one of {nodes[1]} node{'s' * (nodes[1] > 1)}.",
            fix=f"they count from 0 to {nodes[1] - 1}; --nodes says how many there are",
        )
    if nodes == (1, 1):
        return launch_single_node(work, launch)
    return _by_hand(work, replace(launch, nodes=nodes), where)


def _by_hand(work: Workload, launch: Launch, where: Where) -> int:
    from paceline.launcher.cluster import manual

    host, port = _endpoint(where.master)
    return manual.launch_manual(work, launch, manual.ManualNode(where.node_rank, host, launch.port or port))


def _refuse_several_ways(where: Where) -> None:
    names = [name for name in ("hosts", "slurm", "ray", "master", "k8s") if getattr(where, name)]
    if len(names) > 1:
        raise LaunchError(
            "bad-options",
            f"--{' and --'.join(names)} are different ways of launching.",
            fix="choose one of them",
        )
    if where.rendezvous not in (None, "static", "c10d"):
        raise LaunchError("bad-options", f"--rdzv-backend {where.rendezvous!r}: there are static and c10d.")
    if where.rendezvous == "static" and where.node_rank is None:
        raise LaunchError("bad-options", "--rdzv-backend static needs --node-rank on every node.")
    if where.dry_run and not where.slurm:
        raise LaunchError("bad-options", "--dry-run shows a batch script of SLURM, but there is no --slurm.")


def _refuse_bad_variables(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII) or not _can_be_set(value):
            raise LaunchError(
                "bad-variable",
                f"{name!r} can't be the name of an environment variable, or its value can't be one.",
                fix="env: names are letters, digits and _; values hold no NUL",
            )


def _can_be_set(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _nodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text, re.ASCII)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise LaunchError("bad-number", f"--nodes {text!r} is no number of nodes.", fix="such as 2, or 1:4")
    return fewest, most


def _endpoint(text: str | None) -> tuple[str, int]:
    if text is None:
        raise LaunchError(
            "no-master",
            "There are several nodes, but no --master that says where they meet.",
            fix="--master HOST:29500 on every node, HOST being the first one's name or address",
        )
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9_.-]{1,253}))(?::([0-9]{1,5}))?", text, re.ASCII)
    if match is None or text.startswith("-") or not 0 < int(match[3] or PORT) < 65536:
        raise LaunchError("no-master", f"--master {text!r} is no host, with or without a port.", fix="a host:29500")
    return match[1] or match[2], int(match[3] or PORT)


def _several(launch: Launch, where: Where, most: int) -> Launch:
    """With `--nodes 1:4`, fewer machines than there are will do."""
    fewest = _nodes(where.nodes)[0] if where.nodes else most
    if fewest > most:
        raise LaunchError("bad-number", f"--nodes asks for {fewest}, but there are {most} machines.")
    return replace(launch, nodes=(fewest, most))


def _over_ssh(work: Workload, launch: Launch, where: Where) -> int:
    from paceline.launcher.backends import ssh
    from paceline.launcher.backends.hostfile import read_hosts
    from paceline.launcher.cluster import frontend

    hosts = read_hosts(where.hosts or "")
    command = ssh.node_command(str(Path.cwd()), where.python or sys.executable)
    machines = ssh.SshBackend(hosts, command, ssh=ssh.read_ssh(where.ssh or "ssh"), patience=launch.patience)
    ranks = [host.ranks or launch.ranks for host in hosts]
    wanted = _several(launch, where, len(hosts))
    return frontend.launch_on(machines, work, wanted, ranks, address=where.address).status


def _on_ray(work: Workload, launch: Launch, where: Where) -> int:
    from paceline.launcher.backends.ray import RayBackend
    from paceline.launcher.cluster import frontend

    fewest, most = _nodes(where.nodes or "1")
    on_cpu = launch.device == "cpu"
    ranks = launch.ranks or launch.on_cpu
    machines = RayBackend(
        where.ray or "auto", most, ranks, gpu=False if on_cpu else None, patience=launch.patience, wait=launch.wait
    )
    wanted = replace(launch, nodes=(fewest, most))
    reached_at = where.address or machines.address()
    return frontend.launch_on(machines, work, wanted, [ranks] * most, address=reached_at).status


def _in_allocation(work: Workload, launch: Launch, where: Where, inside: slurm_allocation.Allocation) -> int:
    from paceline.launcher.backends import slurm_job
    from paceline.launcher.cluster import frontend

    machines = slurm_allocation.SlurmBackend(inside, workdir=str(Path.cwd()))
    ranks = launch.ranks or inside.gpus
    wanted = _several(launch, where, len(inside.nodes))
    if inside.restarts:  # the job was requeued: it goes on with its own run
        wanted = replace(wanted, resume="auto", restarted=inside.restarts)
    print(f"nodes: {len(inside.nodes)} of SLURM's job {inside.job}", file=sys.stderr, flush=True)
    ended = frontend.launch_on(machines, work, wanted, [ranks] * len(inside.nodes), address=where.address)
    warned = signal.SIGUSR2 in ended.signals
    told = bool({signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & ended.signals)
    if ended.status > 128 and slurm_allocation.wants_requeue(inside, warned=warned, told_to_end=told):
        print(f"job {inside.job} goes back into the queue", file=sys.stderr, flush=True)
        slurm_job.requeue(inside.job)
    return ended.status


def _for_kubernetes(work: Workload, launch: Launch, where: Where, command: Sequence[str]) -> int:
    from paceline.launcher.backends.kubernetes import manifests

    fewest, most = _nodes(where.nodes or "1")
    if fewest != most:
        raise LaunchError("bad-k8s", f"--nodes {where.nodes}: pods of a job come all or none.", fix="give one number")
    own = _own_words(work)
    run = launch.run or "paceline"
    text = manifests(where.k8s_with, command, own, run=run, nodes=most, ranks=launch.ranks)
    print(text, end="")
    return 0


def _own_words(work: Workload) -> int:
    """How many of the last words that a person typed are the script's own."""
    return 0 if work.target is None else len(work.target.args) + 1


def _is_front_end(inside: slurm_allocation.Allocation) -> bool:
    """A batch script is one on a single node too: it hears SLURM's warnings, and goes back into the queue. In a shell
    of salloc on one node a person is at the keyboard."""
    return inside.is_front_end and (len(inside.nodes) > 1 or "SLURM_PROCID" in os.environ)


def _submit(work: Workload, launch: Launch, where: Where, command: Sequence[str]) -> int:
    from paceline.launcher.backends import slurm_job, slurm_script

    own = _own_words(work)
    request = slurm_script.parse(where.slurm or "")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(launch.run or "paceline").name) or "paceline"
    log = str(_LOGS / f"{name}-slurm-%j.log")
    words = [word for place, word in enumerate(command) if word != "--dry-run" or place >= len(command) - own]
    argv = [sys.executable, "-P", "-m", "paceline", *words]
    script = slurm_script.batch_script(request, argv, name=name, workdir=str(Path.cwd()), log=log, env=launch.env or {})
    if where.dry_run:
        print(script, end="")
        return 0
    _LOGS.mkdir(exist_ok=True)
    job = slurm_job.submit(script)
    print(f"job {job}: submitted; {shlex.join(['scancel', job])} ends it", file=sys.stderr, flush=True)
    return slurm_job.follow(job, Path(log.replace("%j", job)))


def _under_contract(work: Workload, launch: Launch, where: Where, found: node_env.NodeEnvironment) -> int:
    from paceline.launcher.cluster import manual

    print(found.words(), file=sys.stderr, flush=True)
    host, port = found.meeting_place()
    nodes = _nodes(where.nodes) if where.nodes else (found.nodes_min, found.nodes_max)
    wanted = replace(launch, nodes=nodes, ranks=launch.ranks or found.ranks)
    place = manual.ManualNode(
        found.node_rank if where.node_rank is None else where.node_rank, host, launch.port or port
    )
    return manual.launch_manual(work, wanted, place)
