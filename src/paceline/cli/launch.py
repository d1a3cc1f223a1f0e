"""`paceline launch`: any script that runs under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Everything behind the script's name belongs to the script.
CONTEXT = {"allow_interspersed_args": False}


def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="what to run, with its arguments")],
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--ranks",
            "--nproc-per-node",
            "--nproc_per_node",
            help="number of ranks; else all GPUs, or one CPU rank",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program of any kind")] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="a new interpreter for each rank, for variables that act at import"),
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="CPU ranks, also where there are GPUs")] = False,
    port: Annotated[int | None, typer.Option("--port", help="where ranks meet; else a free one")] = None,
    run: Annotated[str | None, typer.Option("--run", help="name of the run folder; else the script's")] = None,
) -> None:
    """Run any script that runs under torchrun, on several ranks of this machine."""
    from paceline.errors import LaunchError
    from paceline.launcher.script import Launch, launch_target
    from paceline.launcher.target import Target

    if module and no_python:
        raise LaunchError("bad-options", "-m and --no-python exclude each other.")
    name, *args = command
    target = Target("module" if module else "program" if no_python else "script", name, tuple(args))
    wanted = Launch(
        ranks=ranks,
        run=run or Path(name).stem,
        device="cpu" if cpu else None,
        port=port,
        fresh=fresh,
        env={"CUDA_VISIBLE_DEVICES": ""} if cpu else {},
    )
    raise SystemExit(launch_target(target, wanted))
