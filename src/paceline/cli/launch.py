"""`paceline launch`: any script that runs under torchrun, on this machine or on many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as places
from paceline.cli import script
from paceline.errors import LaunchError

if TYPE_CHECKING:
    from paceline.launcher.target import Target

# Everything behind the script's name belongs to the script.
CONTEXT = {"allow_interspersed_args": False}


def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="what to run, with its arguments")],
    ranks: Annotated[
        int | None,
        typer.Option(*places.RANKS, help="number of ranks on each machine; else all GPUs, or one CPU rank"),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program of any kind")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="a new interpreter for each rank, for variables that act at import")
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="CPU ranks, also where there are GPUs")] = False,
    local_rank: Annotated[
        bool, typer.Option("--pass-local-rank", help="give SCRIPT --local_rank=N, as torch's older launcher did")
    ] = False,
    port: Annotated[int | None, typer.Option("--port", help="where ranks meet; else a free one")] = None,
    run: Annotated[str | None, typer.Option("--run", help="name of the run folder; else the script's")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the newest run of that name")] = False,
    env: places.Env = None,
    max_restarts: places.MaxRestarts = None,
    tee: places.Tee = None,
    nodes: places.Nodes = None,
    node_rank: places.NodeRank = None,
    master: places.Master = None,
    rendezvous: places.Rendezvous = None,
    wait: places.Wait = None,
    interface: places.Interface = None,
    hosts: places.Hosts = None,
    ssh: places.Ssh = None,
    python: places.Python = None,
    address: places.Address = None,
    slurm: places.Slurm = None,
    dry_run: places.DryRun = False,
    ray: places.Ray = None,
    k8s: places.K8s = False,
    k8s_with: places.K8sWith = None,
) -> None:
    """Run any script that runs under torchrun, on several ranks of one machine or of many."""
    from paceline.launcher.dispatch import Where, dispatch
    from paceline.launcher.launch import Launch

    target = _target(command, module, no_python, local_rank)
    wanted = Launch(
        ranks=ranks,
        run=run or Path(target.name).stem,
        device="cpu" if cpu else None,
        port=port,
        fresh=fresh,
        env={**places.read_env(env), **({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})},
        resume="auto" if resume else None,
        restarted=int(resume),
        max_restarts=max_restarts or 0,
        tee=places.read_tee(tee),
        wait=places.WAIT if wait is None else wait,
        interface=interface,
    )
    where = Where(nodes, node_rank, master, hosts, ssh, python, address, slurm, ray, dry_run, k8s, k8s_with, rendezvous)
    raise SystemExit(dispatch(script.work_of(target), wanted, where, sys.argv[1:]))


def _target(command: list[str], module: bool, no_python: bool, local_rank: bool) -> Target:
    from paceline.launcher.target import Target

    if module and no_python:
        raise LaunchError("bad-options", "-m and --no-python exclude each other.")
    name, *args = command
    target = Target("module" if module else "program" if no_python else "script", name, tuple(args), local_rank)
    target.check()
    return target
