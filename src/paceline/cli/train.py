"""`paceline train`: run a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_interspersed_args": True}


def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="a recipe file, and changes to it"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="number of ranks; else all GPUs, or 2 CPU ranks")
    ] = None,
) -> None:
    """Run a recipe; without one, an embedded default that works on any machine."""
    from paceline.config.recipe import Config
    from paceline.launcher.script import Launch, launch_body

    recipe, overrides = split_arguments(arguments or [])
    if ranks is not None:
        overrides = [*overrides, f"launch.ranks={ranks}"]
    config = Config.from_file(recipe, overrides) if recipe else Config.default(overrides)
    name = Path(recipe).stem if recipe else "gpt"
    launch = Launch(
        ranks=config.launch.ranks,
        run=None if config.run is False else config.run if isinstance(config.run, str) else name,
        on_cpu=2,
        device=config.device,
        port=config.port,
        env=config.env,
    )

    def body() -> None:
        from paceline.train.recipe import run_recipe

        run_recipe(config)

    raise SystemExit(launch_body(body, launch, _warm_up))


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The recipe, if the first argument is one, and the overrides."""
    if arguments and ("=" not in arguments[0] or Path(arguments[0]).is_file()):
        return arguments[0], arguments[1:]
    return None, arguments


def _warm_up() -> None:
    """What every rank needs, imported once before they are forked."""
    import paceline.train.recipe  # noqa: F401
