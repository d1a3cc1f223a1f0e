"""`paceline bench`: measure collectives, where the time of a recipe goes, and how it scales.

All backends of `paceline launch` can measure a recipe, because on other nodes it is a module with arguments. The result
of rank 0 comes back through a file in the working directory, which nodes share.
"""

from __future__ import annotations

import json as json_format
import logging
import os
import re
import secrets
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError, PacelineError
from paceline.plan.network_model import bare
from paceline.runtime.scheduler_env import read_allocation
from paceline.text import plural
from paceline.tools.cli import options, workloads

if TYPE_CHECKING:
    from paceline.config.recipe import Config
    from paceline.tools.bench.scaling import ScalingEntry

app = typer.Typer(help="Measure what communication costs.", no_args_is_help=True)

Json = Annotated[str | None, typer.Option("--json", metavar="FILE | -", help="write the report as JSON; -: print it")]
Html = Annotated[str | None, typer.Option("--html", metavar="FILE", help="write a page with charts")]


@app.command("comm", cls=options.HintedCommand, epilog=options.examples("bench comm"))
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
    from paceline.launcher.dispatch import dispatch
    from paceline.launcher.workload import Workload
    from paceline.tools.bench import comm_request

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

    def prepare(world: int) -> None:
        comm_request.require_peers(world)
        if config is not None:
            workloads.checked(bare(config))(world)

    workload = Workload.of_module(
        "paceline.tools.bench.comm_rank",
        request.to_text(),
        prepare=prepare,
        recipe=request.recipe,
        name="paceline bench comm",
    )
    facts = {"device": request.device, "default_cpu_ranks": workloads.DEFAULT_CPU_RANKS}
    facts |= {} if config is None else {"ranks": workloads.ranks_of(config)}
    raise SystemExit(dispatch(workload, LaunchSpec.resolve(config, {**launch_options, **facts}), sys.argv[1:]))


def require_writable(*files: str | None) -> None:
    """Before anything is measured: the folders of the files exist."""
    for file in files:
        if file not in (None, "-") and not Path(file).absolute().parent.is_dir():
            raise LaunchError("bad-options", f"No such folder: {Path(file).parent}.", fix="create it first")


Steps = Annotated[int, typer.Option("--steps", min=3, help="steps to measure, after 5 of warm-up")]
RankCounts = Annotated[
    str,
    typer.Option("-n", "--ranks", metavar="1,2,4", help="numbers of ranks per node; the first one is the reference"),
]
Mode = Annotated[
    Literal["strong", "weak", "both"],
    typer.Option("--mode", help="strong: the same batch; weak: the same batch for each rank"),
]
_RANKS = ("-n", "--ranks", "--nproc-per-node", "--nproc_per_node")
_STARTS_NOTHING = ("--k8s", "--k8s-with", "--dry-run")


@app.command("step", cls=options.HintedCommand, epilog=options.examples("bench step"))
@options.launch_options(without=("--nproc-per-node", "--nproc_per_node", *_STARTS_NOTHING))
def step(
    arguments: workloads.Arguments = None,
    steps: Steps = 30,
    json: Json = None,
    html: Html = None,
    **launch_options: Any,
) -> None:
    """Show where the time of a step goes: data, forward, backward, communication, optimizer, logging."""
    from paceline.tools.bench.step_report import StepReport, step_page

    require_writable(json, html)
    config, name = workloads.read_recipe(arguments, launch_options["ranks"])
    spec = _spec(config, {**launch_options, "ranks": workloads.ranks_of(config)})
    measured = measure_recipe(config, steps, spec)
    report, ranks = StepReport.of(measured.pop("steps")), measured["ranks"]
    title = f"{name}: a step on {plural(ranks, 'rank')}"
    about = f"{measured['layout']}, batch {measured['batch']}, {measured['device']}; medians of {plural(steps, 'step')}"
    rows = report.rows(several=ranks > 1)
    notes = report.notes(measured["strategy"], several=ranks > 1, separate=measured["separate"])
    if json != "-":
        _show(title, [(about, rows)], notes)
    _write(json, json_format.dumps({"recipe": name, **measured, **report.to_json()}, indent=1))
    if html is not None:
        _write(html, step_page(title, about, report, rows, notes))


@app.command("scaling", cls=options.HintedCommand, epilog=options.examples("bench scaling"))
@options.launch_options(without=(*_RANKS, *_STARTS_NOTHING))
def scaling(
    arguments: workloads.Arguments = None,
    ranks: RankCounts = "1,2",
    mode: Mode = "both",
    steps: Steps = 30,
    json: Json = None,
    html: Html = None,
    **launch_options: Any,
) -> None:
    """Measure a recipe on several numbers of ranks, beside what a model of its communication predicts."""
    from paceline.plan.network_model import digest
    from paceline.tools.bench import scaling as figures

    require_writable(json, html)
    counts = _parse_counts(ranks)
    config, name = workloads.read_recipe(arguments, None)
    spec = _spec(config, launch_options)
    _require_free_hosts(spec)
    modes = figures.MODES if mode == "both" else (mode,)
    entries = _measure_all(config, counts, modes, steps, spec)
    if all(entry.failed for entry in entries):
        raise SystemExit(1)
    folder = figures.folder_of("scaling", name, digest(config))
    before = figures.newest(folder)
    values = {"recipe": name, "steps": steps, "entries": [entry.to_json() for entry in entries]}
    stored = figures.store(folder, values)
    title = f"{name}: scaling"
    tables = [(figures.heading(kind, entries), figures.rows(kind, entries, before)) for kind in modes]
    notes = [*figures.notes(entries, before), f"stored in {stored}"]
    if json != "-":
        _show(title, tables, notes)
    _write(json, stored.read_text())
    if html is not None:
        _write(html, figures.scaling_page(title, entries, tables, notes))
    raise SystemExit(any(entry.failed for entry in entries))


def _parse_counts(text: str) -> list[int]:
    """`1,2,4`, in the order given, each once."""
    if not re.fullmatch(r"\s*[1-9][0-9]{0,5}\s*(,\s*[1-9][0-9]{0,5}\s*)*", text, re.ASCII):
        raise LaunchError(
            "bad-number", f"Invalid value for --ranks: {text!r}.", fix="pass numbers of ranks, e.g. --ranks 1,2,4"
        )
    return list(dict.fromkeys(map(int, text.split(","))))


def _require_free_hosts(spec: LaunchSpec) -> None:
    from paceline.launcher.backends.ssh import read_hosts

    fixed = [host for host in read_hosts(spec.hosts) if host.ranks] if spec.hosts else []
    if fixed:
        raise LaunchError(
            "bad-options",
            f"--hosts sets the number of ranks of {fixed[0].name}, which --ranks varies.",
            fix="omit it: --hosts a,b --ranks 1,2,4 measures 2, 4 and 8 ranks",
        )


def _measure_all(
    config: Config, counts: Sequence[int], modes: Sequence[str], steps: int, spec: LaunchSpec
) -> list[ScalingEntry]:
    """An entry for each mode and number of ranks. One that fails has its reason, and the others are measured."""
    from paceline.plan.network_model import scaled
    from paceline.tools.bench.scaling import ScalingEntry

    known: dict[tuple[int, int | None], dict[str, Any]] = {}  # both modes begin with the same
    entries: list[ScalingEntry] = []
    for mode in modes:
        for ranks in counts:
            try:
                sized = scaled(config, mode, ranks, counts[0])
                measured = known.get((ranks, sized.batch))
                if measured is None:
                    log.info(f"measuring {plural(ranks, 'rank')}, batch {sized.batch} ({mode} scaling)")
                    measured = measure_recipe(sized, steps, replace(spec, ranks=ranks), predicts=True)
                    known[ranks, sized.batch] = measured
                entries.append(ScalingEntry.of(mode, measured))
            except PacelineError as error:
                log.warning(f"{plural(ranks, 'rank')} ({mode} scaling): {error}")
                entries.append(ScalingEntry(mode, ranks, failed=f"[{error.code}] {error.what}"))
    return entries


def _spec(config: Config, launch_options: Mapping[str, Any]) -> LaunchSpec:
    """Submits the whole command, if it is to run in a SLURM job."""
    spec = LaunchSpec.resolve(config, {**launch_options, "default_cpu_ranks": workloads.DEFAULT_CPU_RANKS})
    if spec.slurm and read_allocation(os.environ) is None:  # the job runs the command, whose output is followed here
        from paceline.launcher.dispatch import dispatch
        from paceline.launcher.workload import Workload

        raise SystemExit(dispatch(Workload(lambda: None), spec, sys.argv[1:]))
    return spec


def _show(title: str, tables: Sequence[tuple[str, Sequence[Sequence[str]]]], notes: Sequence[str]) -> None:
    print(title)
    for heading, rows in tables:
        print(f"\n{wrapped(heading)}\n{aligned(rows)}")
    print("", *map(wrapped, notes), sep="\n")


def _write(path: str | None, text: str) -> None:
    """`-`: to standard output."""
    if path == "-":
        print(text)
    elif path is not None:
        Path(path).write_text(text)
        log.info(f"written: {path}")


_GAP = 2


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table whose first row is its head, with right-aligned columns except the first one. A table that is wider than
    the terminal is broken into several, each of which begins with the first column."""
    room = width or _terminal_width()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    groups: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        taken = widths[0] + sum(widths[each] + _GAP for each in groups[-1])
        if groups[-1] and taken + widths[column] + _GAP > room:
            groups.append([])
        groups[-1].append(column)
    return "\n\n".join("\n".join(_line(row, group, widths) for row in rows) for group in groups)


def wrapped(text: str) -> str:
    """Text in lines that fit the terminal; further ones are indented."""
    return textwrap.fill(
        text, _terminal_width(), subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _terminal_width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _line(row: Sequence[str], group: Sequence[int], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in group)]
    return (" " * _GAP).join(cells).rstrip()


_THREADS = "OMP_NUM_THREADS"


def measure_recipe(config: Config, steps: int, spec: LaunchSpec, *, predicts: bool = False) -> dict[str, Any]:
    """The result of `bench.recipe_run.measure`. Raises if a rank failed, after its error was shown."""
    from paceline.launcher.dispatch import dispatch
    from paceline.launcher.workload import Workload
    from paceline.run import folder
    from paceline.tools.bench.scaling import RESULTS

    RESULTS.mkdir(parents=True, exist_ok=True)
    result = RESULTS.absolute() / f".{secrets.token_hex(8)}.json"
    request = {"recipe": config.model_dump(mode="json"), "steps": steps, "predicts": predicts}
    workload = Workload.of_module(
        "paceline.tools.bench.recipe_run", json_format.dumps(request), str(result),
        prepare=workloads.checked(bare(config)), name="paceline bench",
    )  # fmt: skip
    # One thread per rank, unless the user has chosen: the same on any number of them.
    env = {_THREADS: os.environ.get(_THREADS, "1"), **spec.env}
    try:
        # On one node, hide how many ranks start: a benchmark says so itself.
        here = not any((spec.hosts, spec.ray, spec.slurm, spec.nodes, spec.master))
        with log.at_level("paceline", logging.WARNING) if here else nullcontext():
            status = dispatch(workload, replace(spec, run=None, env=env), sys.argv[1:])
        if status > 128:
            raise SystemExit(status)  # interrupted
        if status:
            raise LaunchError("rank-failed", f"Ranks exited with status {status}; the cause is shown above.")
        measured: dict[str, Any] = json_format.loads(result.read_bytes())
        return measured
    except FileNotFoundError:
        raise LaunchError(
            "no-result", f"Rank 0 has written no result that this machine can read at {folder.short(result)}."
        ) from None
    finally:
        result.unlink(missing_ok=True)
