"""`paceline train`: run a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_interspersed_args": True}
DEFAULT_CPU_RANKS = 2


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
        ranks=1 if config.strategy == "single" and config.launch.ranks is None else config.launch.ranks,
        run=None if config.run is False else config.run if isinstance(config.run, str) else name,
        on_cpu=DEFAULT_CPU_RANKS,
        device=config.device,
        port=config.port,
        fallback=config.fallback,
        env=config.env,
    )

    def body() -> None:
        from paceline.train.recipe import run_recipe

        run_recipe(config)

    def prepare(number: int) -> None:
        """Import what every rank needs, once; and find what is wrong before any of them starts."""
        import paceline.train.recipe  # noqa: F401
        from paceline.train.build import check

        check(config, number)

    raise SystemExit(launch_body(body, launch, prepare))


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The recipe, if one of the arguments is one, and the overrides."""
    from paceline.errors import ConfigError

    recipes = [argument for argument in arguments if "=" not in argument or Path(argument).is_file()]
    if len(recipes) > 1:
        raise ConfigError(
            "bad-override", f"{recipes[0]} and {recipes[1]} are two recipes.", fix="changes are written key=value"
        )
    return next(iter(recipes), None), [argument for argument in arguments if argument not in recipes]
