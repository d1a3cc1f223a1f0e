"""`paceline parity`: a recipe on several layouts against one process."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from paceline.cli import workloads

CONTEXT = {"allow_interspersed_args": True}


def parity(
    arguments: workloads.Arguments = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option("--layouts", help="fsdp:2, or 'shard=2 tensor=2'; give it again for each, or with commas"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="optimizer steps to compare")] = 10,
    precision: Annotated[
        Literal["fp64", "fp32", "bf16", "fp16"],
        typer.Option("--precision", help="fp64 shows algebra, without rounding"),
    ] = "fp64",
    bound: Annotated[float | None, typer.Option("--bound", help="the largest relative difference")] = None,
) -> None:
    """Train on CPU ranks under several layouts and in one process: loss, gradient norm and weights side by side."""
    from paceline.testing import comparison

    config, _ = workloads.read_recipe(arguments, None)
    wanted = tuple(layout for text in layouts or () for layout in _read(text))
    report = comparison.parity(
        config, layouts=wanted or comparison.DEFAULT_LAYOUTS, steps=steps, precision=precision, bound=bound
    )
    print(report)
    raise SystemExit(0 if report.holds else 1)


def _read(text: str) -> list[str]:
    """Layouts that are listed with commas, some of which may stand within one: `fsdp:2,shard=2,tensor=2` are two."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" in part and found and "=" in found[-1]:
            found[-1] += f" {part}"
        else:
            found.append(part)
    return found
