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
    epilog=options.examples("paceline"),
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


app.command("train", cls=options.HintedCommand, epilog=options.examples("train"))(train.train)
app.command("launch", cls=options.HintedCommand, context_settings=launch.CONTEXT, epilog=options.examples("launch"))(
    launch.launch
)
app.command("evaluate", cls=options.HintedCommand, epilog=options.examples("evaluate"))(evaluate.evaluate)
app.command("init", epilog=options.examples("init"))(config.init)
app.command("node", hidden=True)(launch.node)
app.command("parity", epilog=options.examples("parity"))(train.parity)
app.command("doctor", cls=options.HintedCommand, epilog=options.examples("doctor"))(doctor.doctor)
app.command("explain", epilog=options.examples("explain"))(explain.explain)
app.command("ls", epilog=options.examples("ls"))(runs.ls)
app.command("show", epilog=options.examples("show"))(runs.show)
app.command("compare", epilog=options.examples("compare"))(runs.compare)
app.command("watch", epilog=options.examples("watch"))(runs.watch)
app.command("report", epilog=options.examples("report"))(runs.report)
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
