"""`paceline config`: what a recipe says, and what it could say."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(help="Show the effective recipe, or the schema of all recipes.", no_args_is_help=True)


@app.command("show")
def show(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="a recipe file, and changes to it"),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="derive for that many; else the recipe's, or 2 CPU ranks")
    ] = None,
) -> None:
    """Print the effective recipe with where each value came from, then what follows from it."""
    from paceline.cli.train import DEFAULT_CPU_RANKS, split_arguments
    from paceline.config import derive
    from paceline.config import show as text
    from paceline.config.recipe import Config

    recipe, overrides = split_arguments(arguments or [])
    config = Config.from_file(recipe, overrides) if recipe else Config.default(overrides)
    print(text.effective(config))
    number = ranks or config.launch.ranks or DEFAULT_CPU_RANKS
    print(f"\n# derived, for {number} rank{'s' if number > 1 else ''}:")
    batch = derive.derive_batch(config, number)
    rows = {**batch.rows(), "learning rate": derive.learning_rate(config, batch.size)}
    print("\n".join("# " + line for line in text.table(rows).splitlines()))


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    from paceline.config.recipe import Config

    print(json.dumps(Config.model_json_schema(), indent=2))
