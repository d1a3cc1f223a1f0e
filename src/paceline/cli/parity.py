"""`paceline parity`: a recipe on several layouts against one process."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from paceline.cli import recipe

CONTEXT = {"allow_interspersed_args": True}


def parity(
    arguments: recipe.Arguments = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option("--layouts", help="fsdp:2, or 'shard=2 tensor=2'; give it again for each, or with commas"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="optimizer steps to compare")] = 10,
    precision: Annotated[
        Literal["fp64", "fp32", "bf16", "fp16"],
        typer.Option("--precision", help="fp64 shows algebra, without rounding"),
    ] = "fp64",
    bound: Annotated[float | None, typer.Option("--bound", help="the largest relative difference")] = None,
) -> None:
    """Train on CPU ranks under several layouts and in one process: loss, gradient norm and weights side by side."""
    from paceline.testing import comparison

    config, _ = recipe.read(arguments, None)
    wanted = tuple(part.strip() for text in layouts or () for part in text.split(",") if part.strip())
    report = comparison.parity(
        config, layouts=wanted or comparison.DEFAULT_LAYOUTS, steps=steps, precision=precision, bound=bound
    )
    print(report)
    raise SystemExit(0 if report.holds else 1)
