"""`paceline train`: run a recipe, on this machine or on many."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as places
from paceline.cli import recipe

if TYPE_CHECKING:
    from paceline.config.sections import LaunchSection as Section
    from paceline.launcher.dispatch import Where

CONTEXT = {"allow_interspersed_args": True}


def train(
    arguments: recipe.Arguments = None,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", help="number of ranks on each machine; else all GPUs, or 2 CPU ranks"),
    ] = None,
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
    """Run a recipe; without one, an embedded default that works on any machine."""
    from paceline.launcher.dispatch import Where, dispatch
    from paceline.launcher.launch import Launch

    config, name = recipe.read(arguments, ranks)
    said = config.launch
    launch = Launch(
        ranks=recipe.ranks_of(config),
        run=None if config.run is False else config.run if isinstance(config.run, str) else name,
        on_cpu=recipe.DEFAULT_CPU_RANKS,
        device=config.device,
        port=config.port,
        fallback=config.fallback,
        env=config.env,
        grace=config.checkpoint.grace,
        resume=config.resume,
        max_restarts=said.max_restarts if max_restarts is None else max_restarts,
        tee=places.read_tee(tee) or tuple(said.tee),
        wait=said.wait if wait is None else wait,
        interface=interface or said.interface,
    )
    asked = Where(nodes, node_rank, master, hosts, ssh, python, address, slurm, ray, dry_run, k8s, k8s_with, rendezvous)
    raise SystemExit(dispatch(recipe.work_of(config), launch, _completed(asked, said), sys.argv[1:]))


def _completed(asked: Where, said: Section) -> Where:
    """What the command line leaves open is as the recipe's `launch:` says."""
    names = ("nodes", "node_rank", "master", "hosts", "ssh", "python", "address", "slurm", "ray")
    return replace(asked, **{name: getattr(said, name) for name in names if getattr(asked, name) is None})
