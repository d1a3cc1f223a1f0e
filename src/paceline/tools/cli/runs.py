"""Runs in the terminal: `paceline ls`, `show` and `compare`; and as pages: `paceline watch` and `report`."""

from __future__ import annotations

import getpass
import json as json_format
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline.errors import CheckpointError, LaunchError
from paceline.run.folder import ROOT, RunFolder
from paceline.tools.cli.options import Json


def ls(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="a folder of run folders, or a study; default: runs/")
    ] = ROOT,
    everything: Annotated[bool, typer.Option("--all", help="also list the trials of studies")] = False,
    json: Json = False,
) -> None:
    """List runs with their state, step, loss and speed, newest first. The age is the time since the last update."""
    from paceline.tools.watch import run_list

    if folder != ROOT and not folder.is_dir():
        raise CheckpointError("no-run", f"Folder {str(folder)!r} does not exist.")
    lines = run_list.list_runs(folder, trials=everything)
    if json:
        print(json_format.dumps([line.to_json() for line in lines], indent=2))
    else:
        print(run_list.table(lines) if lines else f"No runs found in {str(folder)!r}.")


def show(run: Annotated[str, typer.Argument(help="name or path of a run")], json: Json = False) -> None:
    """Show one run: state, curves, why it failed, checkpoints, where its time went, and where its logs are."""
    from paceline.tools.watch import run_facts, run_list, run_screen

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
    from paceline.tools.watch import report, run_facts, run_list, run_screen

    if len(runs) < 2:
        raise typer.BadParameter("expected at least two runs")
    folders = [run_list.find_run(run) for run in runs]
    print(run_screen.comparison([run_facts.read_facts(folder) for folder in folders], by))
    if not text:
        report.write_report(folders, output, by)
        print(f"\n{output}")


_NICE = 10  # training on this machine goes first

Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="default: a free one")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="where to write; default: report.html, or the run folder with --to"),
]


def watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN …]", help="names or paths of runs; a study or a folder of runs; default: runs/"),
    ] = None,
    port: Port = 0,
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1",
) -> None:
    """Show runs on a live page, which a browser opens at the printed address. Ctrl-C ends it; runs are not affected."""
    from paceline.tools.watch import page_server, run_list, watched_runs

    root, chosen = ROOT, list[RunFolder]()
    sweep: Callable[[], dict[str, Any]] = dict
    try:
        chosen = [run_list.find_run(name) for name in runs or []]
    except CheckpointError:
        if not runs or len(runs) > 1 or not Path(runs[0]).is_dir():
            raise
        root = Path(runs[0])  # a study, or a folder of runs
        sweep = partial(_sweep_values, root.absolute()) if run_list.is_study(root) else sweep
    try:
        server = page_server.PageServer(watched_runs.WatchedRuns(chosen, root, sweep), host, port)
    except OSError as error:
        raise LaunchError(
            "port-in-use",
            f"Can't listen on {host}:{port}: {error.strerror}.",
            fix="omit --port to use a free port, and --host to listen on loopback",
        ) from None
    os.nice(_NICE)
    try:
        _explain_address(host, server.server_port)
        print(server.url, flush=True)
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.server_close()


def _sweep_values(path: Path) -> dict[str, Any]:
    from paceline.run.study_folder import StudyFolder
    from paceline.tools.search import results
    from paceline.tools.search.study import Study

    return results.page_values(Study.load(StudyFolder(path)))


def _explain_address(host: str, port: int) -> None:
    if host in ("127.0.0.1", "::1", "localhost"):
        user = ""
        with suppress(KeyError, OSError):  # a container may have no name for the user
            user = f"{getpass.getuser()}@"
        line = f"ssh -L {port}:localhost:{port} {user}{socket.gethostname()}"
        print(f"from another machine, run there first: {line}", file=sys.stderr)
    else:
        who = f"anybody who can reach {host}:{port} and sees this address"
        print(f"warning: {who} can read these runs; the connection is not encrypted", file=sys.stderr)


def report(
    run: Annotated[str, typer.Argument(help="name or path of a run")],
    output: Output = None,
    to: Annotated[
        Literal["html", "tensorboard", "csv"], typer.Option("--to", help="write metrics for another tool instead")
    ] = "html",
) -> None:
    """Write a page about a run into one file, which needs no server and no network."""
    from paceline.text import format_bytes
    from paceline.tools.watch import report as reports
    from paceline.tools.watch import run_list

    folder = run_list.find_run(run)
    if to == "html":
        path = output or Path("report.html")
        reports.write_report([folder], path)
        print(f"{path} ({format_bytes(path.stat().st_size)})")
    else:
        from paceline.monitor.loggers import convert

        print(convert(folder, to, output))
