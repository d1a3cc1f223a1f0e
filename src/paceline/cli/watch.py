"""`paceline watch` and `paceline report`: pages about runs."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.options import examples
from paceline.errors import CheckpointError, LaunchError
from paceline.run.folder import ROOT, RunFolder

WATCH_EXAMPLES = examples("watch", "watch gpt", "watch gpt gpt-2", "watch runs/mlp-sweep")
REPORT_EXAMPLES = examples("report gpt", "report gpt -o gpt.html", "report gpt --to tensorboard -o tensorboard/gpt")

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
    from paceline.watch import page_server, run_list

    root, chosen = ROOT, list[RunFolder]()
    try:
        chosen = [run_list.find_run(name) for name in runs or []]
    except CheckpointError:
        if not runs or len(runs) > 1 or not Path(runs[0]).is_dir():
            raise
        root = Path(runs[0])  # a study, or a folder of runs
    try:
        server = page_server.PageServer(page_server.WatchedRuns(chosen, root), host, port)
    except OSError as error:
        raise LaunchError(
            "port-in-use",
            f"Can't listen on {host}:{port}: {error.strerror}.",
            fix="omit --port to use a free port, and --host to listen on loopback",
        ) from None
    os.nice(_NICE)
    print(server.url, flush=True)
    _explain_address(host, server.server_port)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        server.server_close()


def _explain_address(host: str, port: int) -> None:
    if host in ("127.0.0.1", "::1", "localhost"):
        line = f"ssh -L {port}:localhost:{port} {_user()}{socket.gethostname()}"
        print(f"from another machine, run there first: {line}", file=sys.stderr)
    else:
        who = f"anybody who can reach {host}:{port} and sees this address"
        print(f"warning: {who} can read these runs; the connection is not encrypted", file=sys.stderr)


def _user() -> str:
    try:
        return f"{getpass.getuser()}@"
    except (KeyError, OSError):  # a container may have no name for the user
        return ""


def report(
    run: Annotated[str, typer.Argument(help="name or path of a run")],
    output: Output = None,
    to: Annotated[
        Literal["html", "tensorboard", "csv"], typer.Option("--to", help="write metrics for another tool instead")
    ] = "html",
) -> None:
    """Write a page about a run into one file, which needs no server and no network."""
    from paceline.text import format_bytes
    from paceline.watch import report as reports
    from paceline.watch import run_list

    folder = run_list.find_run(run)
    if to == "html":
        path = output or Path("report.html")
        reports.write_report([folder], path)
        print(f"{path} ({format_bytes(path.stat().st_size)})")
    else:
        from paceline.monitor.loggers import convert

        print(convert(folder, to, output))
