"""The options that say where ranks run, of `paceline launch` and `paceline train` alike."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from paceline.errors import LaunchError

WAIT = 600.0
RANKS = ("-n", "--ranks", "--nproc-per-node", "--nproc_per_node")

_BY_HAND, _FROM_HERE, _CARE = "Several nodes by hand", "Several nodes from here", "Supervision"

MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        "--max_restarts",
        min=0,
        help="how often failed ranks are started again, from the newest good checkpoint",
        rich_help_panel=_CARE,
    ),
]
Tee = Annotated[
    str | None,
    typer.Option("--tee", metavar="0,2", help="ranks that are shown, each line with its rank", rich_help_panel=_CARE),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes", "--nnodes", metavar="N | MIN:MAX", help="how many machines take part", rich_help_panel=_BY_HAND
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node-rank", "--node_rank", min=0, help="which one this is; else the next free", rich_help_panel=_BY_HAND
    ),
]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        metavar="HOST[:PORT]",
        help="where they meet: the first one, at port 29500 unless said (and the next one for the ranks)",
        rich_help_panel=_BY_HAND,
    ),
]
Rendezvous = Annotated[
    str | None,
    typer.Option(
        "--rdzv-backend",
        "--rdzv_backend",
        metavar="static | c10d",
        help="static: each says its --node-rank; c10d: numbers are given in the order of arrival",
        rich_help_panel=_BY_HAND,
    ),
]
Wait = Annotated[
    float | None,
    typer.Option("--wait", help="seconds in which the others have to come (600)", rich_help_panel=_BY_HAND),
]
Interface = Annotated[
    str | None,
    typer.Option("--interface", help="that reaches the other machines; else it is found", rich_help_panel=_BY_HAND),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts", metavar="A:4,B:4 | FILE", help="start it on these machines, by ssh", rich_help_panel=_FROM_HERE
    ),
]
Ssh = Annotated[
    str | None,
    typer.Option("--ssh", metavar="'ssh -p 2222'", help="the ssh program with options", rich_help_panel=_FROM_HERE),
]
Python = Annotated[
    str | None,
    typer.Option("--python", help="the interpreter on the other machines; else this one", rich_help_panel=_FROM_HERE),
]
Address = Annotated[
    str | None,
    typer.Option("--address", help="of this machine, as the others reach it", rich_help_panel=_FROM_HERE),
]
Slurm = Annotated[
    str | None,
    typer.Option(
        "--slurm", metavar="nodes=2,gpus=4,time=2h", help="submit it to SLURM, and follow", rich_help_panel=_FROM_HERE
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show SLURM's batch script, and submit nothing", rich_help_panel=_FROM_HERE)
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="auto | HOST:PORT", help="start it on a Ray cluster", rich_help_panel=_FROM_HERE),
]
K8s = Annotated[
    bool, typer.Option("--k8s", help="print a TrainJob and a JobSet for Kubernetes", rich_help_panel=_FROM_HERE)
]
K8sWith = Annotated[
    str | None,
    typer.Option(
        "--k8s-with",
        metavar="image=IMAGE,gpus=4,…",
        help="also kind, name, namespace, cpu, memory, secret, claim=NAME:/PATH, restarts, grace",
        rich_help_panel=_FROM_HERE,
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME[=VALUE]", help="a variable for every rank, on every machine; may be repeated"),
]


def read_env(texts: list[str] | None) -> dict[str, str]:
    """Without a value it is the one that the variable has here."""
    pairs = [text.partition("=") for text in texts or ()]
    missing = [name for name, equals, _ in pairs if not equals and name not in os.environ]
    if missing:
        raise LaunchError(
            "bad-variable", f"--env {missing[0]}: there is no such variable here.", fix="--env NAME=VALUE"
        )
    return {name: value if equals else os.environ[name] for name, equals, value in pairs}


def read_tee(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", text, re.ASCII):
        raise LaunchError("bad-number", f"--tee {text!r} is no list of ranks.", fix="such as --tee 0,2")
    return tuple(int(number) for number in text.split(","))
