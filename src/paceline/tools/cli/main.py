"""The `paceline` command, with one module per subcommand. Heavy imports are deferred until a subcommand needs them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from paceline import __version__
from paceline.errors import PacelineError
from paceline.tools.cli import bench, checkpoint, config, doctor, evaluate, explain, launch, options, runs, sweep, train

app = typer.Typer(
    name="paceline",
    help="Reliable distributed training for PyTorch.",
    no_args_is_help=True,
    invoke_without_command=True,
    epilog=options.examples("train", "launch -n 4 train.py", "explain launch.no-script", "--install-completion"),
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def top_level(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


_LAUNCHES = options.examples(
    "launch -n 4 train.py --lr 1e-3", "launch --hosts node1,node2 train.py", "launch -n 2 -m package.train"
)
app.command("train", cls=options.HintedCommand, epilog=train.EXAMPLES)(train.train)
app.command("launch", cls=options.HintedCommand, context_settings=launch.CONTEXT, epilog=_LAUNCHES)(launch.launch)
app.command("evaluate", cls=options.HintedCommand, epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("init", epilog=config.INIT_EXAMPLES)(config.init)
app.command("node", hidden=True)(launch.node)
app.command("parity", epilog=train.PARITY_EXAMPLES)(train.parity)
app.command("doctor", cls=options.HintedCommand, epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("explain", epilog=explain.EXAMPLES)(explain.explain)
app.command("ls", epilog=runs.LS_EXAMPLES)(runs.ls)
app.command("show", epilog=runs.SHOW_EXAMPLES)(runs.show)
app.command("compare", epilog=runs.COMPARE_EXAMPLES)(runs.compare)
app.command("watch", epilog=runs.WATCH_EXAMPLES)(runs.watch)
app.command("report", epilog=runs.REPORT_EXAMPLES)(runs.report)
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(bench.app, name="bench")
app.add_typer(sweep.app, name="sweep")


def main() -> None:
    """Print errors that have a code without a traceback."""
    _open_closed_streams()
    try:
        app()
    except PacelineError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


def _open_closed_streams() -> None:
    """If a standard stream is closed (`>&-`), the next file to be opened would get its descriptor."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
