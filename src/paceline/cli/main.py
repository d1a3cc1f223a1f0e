"""`paceline`: one thin file a verb. Nothing heavy is imported before a verb needs it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import config, explain, launch, train
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    help="PyTorch distributed training that a person can trust.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="print the version and end", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


app.command("train", context_settings=train.CONTEXT)(train.train)
app.command("launch", context_settings=launch.CONTEXT)(launch.launch)
app.command("explain")(explain.explain)
app.add_typer(config.app, name="config")


def main() -> None:
    """An error with a code is its text, not a traceback."""
    try:
        app()
    except PacelineError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
