"""`paceline ls`, `paceline show` and `paceline compare`: runs in the terminal."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.options import examples
from paceline.errors import CheckpointError
from paceline.run.folder import ROOT

LS_EXAMPLES = examples("ls", "ls runs/mlp-sweep", "ls --all --json")
SHOW_EXAMPLES = examples("show gpt", "show runs/mlp-sweep/trials/0003", "show gpt --json")
COMPARE_EXAMPLES = examples("compare gpt gpt-2", "compare gpt gpt-2 gpt-3 --by time", "compare gpt gpt-2 --text")

Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def ls(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="a folder of run folders, or a study; default: runs/")
    ] = ROOT,
    everything: Annotated[bool, typer.Option("--all", help="also list the trials of studies")] = False,
    json: Json = False,
) -> None:
    """List runs with their state, step, loss and speed, newest first. The age is the time since the last update."""
    from paceline.watch import run_list

    if folder != ROOT and not folder.is_dir():
        raise CheckpointError("no-run", f"Folder {str(folder)!r} does not exist.", fix="pass a folder of run folders")
    lines = run_list.list_runs(folder, trials=everything)
    if json:
        print(json_format.dumps([line.to_json() for line in lines], indent=2))
    else:
        print(run_list.table(lines) if lines else f"No runs found in {str(folder)!r}.")


def show(run: Annotated[str, typer.Argument(help="name or path of a run")], json: Json = False) -> None:
    """Show one run: state, curves, why it failed, checkpoints, where its time went, and where its logs are."""
    from paceline.watch import run_facts, run_list, run_screen

    facts = run_facts.read_facts(run_list.find_run(run))
    print(json_format.dumps(run_screen.screen_values(facts), indent=2) if json else run_screen.screen(facts))


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="names or paths of runs")],
    by: Annotated[Literal["step", "time", "samples"], typer.Option("--by", help="how losses are aligned")] = "step",
    text: Annotated[bool, typer.Option("--text", help="print only, and write no page")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="where to write the page")] = Path("compare.html"),
) -> None:
    """Compare runs: results, the keys of their recipes that differ, and losses at the same step, time or samples.

    They are printed, and written as a page with all curves over each other. `paceline watch RUN RUN` shows that page of
    runs that are still running.
    """
    from paceline.watch import report, run_comparison, run_facts, run_list

    if len(runs) < 2:
        raise typer.BadParameter("expected at least two runs")
    folders = [run_list.find_run(run) for run in runs]
    print(run_comparison.comparison([run_facts.read_facts(folder) for folder in folders], by))
    if not text:
        report.write_report(folders, output, by)
        print(f"\n{output}")
