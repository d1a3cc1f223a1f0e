"""`paceline launch`: run a script on one or more nodes; and `paceline node`, the launcher of one node, which the front
end of a job starts.

A node reads its order, one line of JSON, from standard input (launcher/cluster/fingerprint.py). Standard input then
stays open; when it is closed, the front end has exited.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.tools.cli import options, workloads

if TYPE_CHECKING:
    from paceline.launcher.workload import Target

# Arguments after the script name are passed to the script.
CONTEXT = {"allow_interspersed_args": False}


@options.launch_options()
def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="script to run, with its arguments")],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as with python -m")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is an executable")] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="start a new interpreter for each rank, for variables that are read at import"),
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="use CPU ranks even if GPUs are available")] = False,
    local_rank: Annotated[
        bool, typer.Option("--pass-local-rank", help="pass --local_rank=N to SCRIPT, as torch.distributed.launch does")
    ] = False,
    port: Annotated[int | None, typer.Option("--port", help="rendezvous port; default: a free port")] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="name of the run folder; default: run= of the Trainer, or the script's name"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="resume the newest run of that name")] = False,
    env: options.Env = None,
    **launch_options: Any,
) -> None:
    """Run a script on one or more nodes. Scripts that run under torchrun run unchanged."""
    from paceline.launcher.dispatch import dispatch

    target = _target(command, module, no_python, local_rank)
    workloads.warn_misplaced_options(target)
    spec = LaunchSpec.resolve(
        None,
        {
            **launch_options,
            "run": run or Path(target.name).stem,
            "is_named": bool(run),
            "device": "cpu" if cpu else None,
            "port": port,
            "fresh": fresh,
            "env": {**options.read_env(env), **({"CUDA_VISIBLE_DEVICES": ""} if cpu else {})},
            "resume": "auto" if resume else None,
            "prior_starts": int(resume),
        },
    )
    raise SystemExit(dispatch(workloads.script_workload(target), spec, sys.argv[1:]))


def _target(command: list[str], module: bool, no_python: bool, local_rank: bool) -> Target:
    from paceline.launcher.workload import Target

    if module and no_python:
        raise LaunchError("bad-options", "-m and --no-python are mutually exclusive.")
    name, *args = command
    target = Target("module" if module else "program" if no_python else "script", name, tuple(args), local_rank)
    workloads.require_script(target)
    target.check()
    return target


def node() -> None:
    """Run the launcher of one node. Started by `paceline launch` on another machine."""
    from paceline.config.recipe import Config
    from paceline.launcher.cluster import fingerprint
    from paceline.launcher.cluster.node import Node
    from paceline.launcher.local.start import prepare_environment
    from paceline.launcher.workload import choose_ranks

    order = fingerprint.read(0)
    _enter(order.folder)
    spec = order.spec
    prepare_environment(spec)
    if order.target is not None:
        order.target.check()
        workload = workloads.script_workload(order.target)
    else:
        workload = workloads.recipe_workload(Config.model_validate(order.recipe))
    ranks, _ = choose_ranks(spec.ranks, device=spec.device, on_cpu=spec.default_cpu_ranks)
    # Ranks read from /dev/null; the launcher keeps the original standard input, to notice when it is closed.
    source = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Imported before connecting, because a launcher that imports torch sends no heartbeats.
    import paceline.launcher.local.agent  # noqa: F401

    workload.preload()
    launcher = Node(workload, spec, ranks, fingerprint.reachable(order), order.token, number=order.node, orders=source)
    raise SystemExit(launcher.run())


def _enter(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            "no-folder", f"Cannot change to the working directory {folder} on {socket.gethostname()}: {error.strerror}."
        ) from None
