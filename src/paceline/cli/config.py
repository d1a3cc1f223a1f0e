"""`paceline config`: show the effective recipe, or the JSON schema of recipes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from paceline.cli import workloads
from paceline.text import plural

app = typer.Typer(help="Show the effective recipe, or the JSON schema of recipes.", no_args_is_help=True)


@app.command("show")
def show(
    arguments: workloads.Arguments = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="number of ranks; default: launch.ranks of the recipe, or 2")
    ] = None,
) -> None:
    """Print the effective recipe with the source of each value, and the values derived from it."""
    from paceline.config import show as text
    from paceline.plan import batch as plan_batch
    from paceline.plan import derived, layout, passes, schedule

    config, _ = workloads.read_recipe(arguments, ranks)
    print(text.effective(config))
    number = workloads.ranks_of(config) or workloads.DEFAULT_CPU_RANKS
    print(f"\n# derived for {plural(number, 'rank')}:")
    plan = layout.derive_layout(config, number)
    passes.require_allowed(config, plan)
    batch = plan_batch.derive_batch(config, plan)
    rows = {**batch.rows(), "learning rate": schedule.learning_rate(config, batch.size)}
    print("\n".join("# " + line for line in derived.table(rows).splitlines()))
    applied = passes.passes_for(config, plan.degrees)
    print("\n# applied to the model, in this order:")
    width = max(len(each.name) for each in applied)
    for number, each in enumerate(applied, 1):
        print(f"#   {number}. {each.name:<{width}}  {each.reason}")


@app.command("schema")
def schema() -> None:
    """Print the JSON schema of recipes, for use in editors."""
    from paceline.config.recipe import Config

    print(json.dumps(Config.json_schema(), indent=2))
