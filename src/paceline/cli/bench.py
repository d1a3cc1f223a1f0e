"""`paceline bench`: measure collectives."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.cli import options, workloads
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError

app = typer.Typer(help="Measure what communication costs.", no_args_is_help=True)
CONTEXT = {"allow_interspersed_args": True}

Json = Annotated[str | None, typer.Option("--json", metavar="FILE | -", help="write the report as JSON; -: print it")]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="write a page with charts")]


@app.command(
    "comm",
    cls=options.HintedCommand,
    context_settings=CONTEXT,
    epilog=options.examples("bench comm", "bench comm recipe.yaml -n 4", "bench comm --hosts node1,node2"),
)
@options.launch_options(without=("--nproc-per-node", "--nproc_per_node"))
def comm(
    arguments: workloads.Arguments = None,
    collectives: Annotated[
        str | None, typer.Option("--collectives", help="e.g. all_reduce,broadcast; default: all")
    ] = None,
    sizes: Annotated[
        str | None, typer.Option("--sizes", help="e.g. 1KiB,64KiB,1MiB; default: 1 KiB to 256 MiB, each 4 times larger")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="time for each collective; larger sizes are then omitted")
    ] = 10.0,
    backend: Annotated[
        Literal["nccl", "gloo", "mpi"] | None, typer.Option("--backend", help="default: nccl on GPU, gloo on CPU")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="use CPU ranks even if GPUs are available")] = False,
    json: Json = None,
    html: Html = None,
    **launch_options: Any,
) -> None:
    """Measure collectives between ranks: latency, bandwidth, and a model of both for any size. With a recipe (or
    key=value of the embedded one), also advice on its `sync` setting for this network."""
    from paceline.bench import comm_request
    from paceline.launcher.dispatch import dispatch
    from paceline.launcher.workload import Target, Workload

    config = None
    if arguments:
        own = ["device=cpu"] * cpu + ([f"backend={backend}"] if backend else [])
        config, _ = workloads.read_recipe([*arguments, *own, "sync=null"], launch_options["ranks"])
    request = comm_request.CommRequest(
        collectives=comm_request.parse_collectives(collectives) if collectives else comm_request.DEFAULT_COLLECTIVES,
        sizes=comm_request.parse_sizes(sizes) if sizes else comm_request.SIZES,
        seconds=seconds,
        backend=backend if config is None else config.backend,
        device=("cpu" if cpu else None) if config is None else config.device,
        json=json,
        html=html,
        recipe=None if config is None else config.model_dump(mode="json"),
    )
    request.require_fit()
    require_writable(json, html)

    def body() -> None:
        from paceline.bench.comm_rank import main

        main(request)

    def prepare(world: int) -> None:
        comm_request.require_peers(world)
        if config is not None:
            from paceline.plan.network_model import bare
            from paceline.train.factory import check

            check(bare(config), world)

    target = Target("module", "paceline.bench.comm_rank", (request.to_text(),))  # for other nodes
    workload = Workload(body, _preload, prepare, target=target, recipe=request.recipe, name="paceline bench comm")
    facts = {"device": request.device, "default_cpu_ranks": workloads.DEFAULT_CPU_RANKS}
    facts |= {} if config is None else {"ranks": workloads.ranks_of(config)}
    raise SystemExit(dispatch(workload, LaunchSpec.resolve(config, {**launch_options, **facts}), sys.argv[1:]))


def _preload() -> None:
    import paceline.bench.comm_rank  # noqa: F401


def require_writable(*files: str | None) -> None:
    """Before anything is measured: the folders of the files exist."""
    for file in files:
        if file not in (None, "-") and not Path(file).absolute().parent.is_dir():
            raise LaunchError("bad-options", f"No such folder: {Path(file).parent}.", fix="create it first")
