"""`paceline parity`: compare a recipe under several layouts with a single process."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from paceline.cli import workloads
from paceline.cli.options import examples

CONTEXT = {"allow_interspersed_args": True}
EXAMPLES = examples(
    "parity recipe.yaml --layouts ddp:2,fsdp:2",
    "parity recipe.yaml --layouts 'shard=2 tensor=2'",
    "parity recipe.yaml --bits",
)


def parity(
    arguments: workloads.Arguments = None,
    layouts: Annotated[
        list[str] | None,
        typer.Option(
            "--layouts", help="layout to compare, e.g. fsdp:2 or 'shard=2 tensor=2'; comma-separated or repeated"
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="number of optimizer steps to compare")] = 10,
    precision: Annotated[
        Literal["fp64", "fp32", "bf16", "fp16"] | None,
        typer.Option("--precision", help="default: fp64, which excludes rounding differences; with --bits fp32"),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option("--bound", help="largest relative difference allowed; default: depends on the precision"),
    ] = None,
    bits: Annotated[
        bool,
        typer.Option("--bits", help="set deterministic: everywhere; ddp on 2 to 4 ranks must be equal to the bit"),
    ] = False,
) -> None:
    """Train on CPU under several layouts and in a single process, and compare loss, gradient norm and weights."""
    from paceline.testing import comparison

    config, _ = workloads.read_recipe(arguments, None)
    wanted = tuple(layout for text in layouts or () for layout in _read(text))
    report = comparison.parity(config, layouts=wanted, steps=steps, precision=precision, bound=bound, bits=bits)
    print(report)
    raise SystemExit(0 if report.holds else 1)


def _read(text: str) -> list[str]:
    """Split a comma-separated list of layouts. `fsdp:2,shard=2,tensor=2` is two: a layout may contain commas itself."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if "=" in part and found and "=" in found[-1]:
            found[-1] += f" {part}"
        else:
            found.append(part)
    return found
