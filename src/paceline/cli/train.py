"""`paceline train`: run a recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import recipe

CONTEXT = {"allow_interspersed_args": True}


def train(
    arguments: recipe.Arguments = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="number of ranks; else all GPUs, or 2 CPU ranks")
    ] = None,
) -> None:
    """Run a recipe; without one, an embedded default that works on any machine."""
    from paceline.launcher.script import Launch, launch_body

    config, name = recipe.read(arguments, ranks)
    launch = Launch(
        ranks=recipe.ranks_of(config),
        run=None if config.run is False else config.run if isinstance(config.run, str) else name,
        on_cpu=recipe.DEFAULT_CPU_RANKS,
        device=config.device,
        port=config.port,
        fallback=config.fallback,
        env=config.env,
        grace=config.checkpoint.grace,
        resume=config.resume,
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
