"""`paceline bench step` and `paceline bench scaling`: where the time of a recipe goes, and how it scales."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from json import dumps as to_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline import log
from paceline.cli import options, workloads
from paceline.cli.bench import Html, Json, require_writable
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError, PacelineError
from paceline.text import plural

if TYPE_CHECKING:
    from paceline.bench.scaling import ScalingEntry
    from paceline.config.recipe import Config

STEP_EXAMPLES = options.examples("bench step recipe.yaml", "bench step recipe.yaml -n 4 batch=64 --html step.html")
SCALING_EXAMPLES = options.examples(
    "bench scaling recipe.yaml --ranks 1,2,4", "bench scaling recipe.yaml --ranks 1,8 --mode weak --hosts a,b"
)
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


@options.launch_options(without=("--nproc-per-node", "--nproc_per_node", *_STARTS_NOTHING))
def step(
    arguments: workloads.Arguments = None,
    steps: Steps = 30,
    json: Json = None,
    html: Html = None,
    **launch_options: Any,
) -> None:
    """Show where the time of a step goes: data, forward, backward, communication, optimizer, logging."""
    from paceline.bench.step_report import StepReport, step_page
    from paceline.cli.bench_launch import measure_recipe

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
    _write(json, to_json({"recipe": name, **measured, **report.to_json()}, indent=1))
    if html is not None:
        _write(html, step_page(title, about, report, rows, notes))


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
    from paceline.bench import scaling as figures
    from paceline.bench import stored_results
    from paceline.plan.network_model import digest

    require_writable(json, html)
    counts = _parse_counts(ranks)
    config, name = workloads.read_recipe(arguments, None)
    spec = _spec(config, launch_options)
    _require_free_hosts(spec)
    modes = figures.MODES if mode == "both" else (mode,)
    entries = _measure_all(config, counts, modes, steps, spec)
    if all(entry.failed for entry in entries):
        raise SystemExit(1)
    folder = stored_results.folder_of("scaling", name, digest(config))
    before = stored_results.newest(folder)
    values = {"recipe": name, "steps": steps, "entries": [entry.to_json() for entry in entries]}
    stored = stored_results.store(folder, values)
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
    from paceline.bench.scaling import ScalingEntry
    from paceline.cli.bench_launch import measure_recipe
    from paceline.plan.network_model import scaled

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
    from paceline.cli.bench_launch import submit_if_requested

    spec = LaunchSpec.resolve(config, {**launch_options, "default_cpu_ranks": workloads.DEFAULT_CPU_RANKS})
    submit_if_requested(spec)
    return spec


def _show(title: str, tables: Sequence[tuple[str, Sequence[Sequence[str]]]], notes: Sequence[str]) -> None:
    from paceline.cli.bench_recipes import aligned, wrapped

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
