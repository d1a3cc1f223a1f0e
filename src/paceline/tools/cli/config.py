"""`paceline config`: show the effective recipe, the keys of recipes, or their JSON schema. `paceline init`: write a
starter project."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError, did_you_mean
from paceline.text import plural
from paceline.tools.cli import workloads
from paceline.tools.cli.options import Json, examples

STARTER = Path(__file__).with_name("starter")  # NAME.txt: they are data, not modules of this package

app = typer.Typer(help="Show the effective recipe, the keys of recipes, or their JSON schema.", no_args_is_help=True)


@app.command("show", epilog=examples("config show"))
def show(
    arguments: workloads.Arguments = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", help="number of ranks; default: launch.ranks of the recipe, or 2")
    ] = None,
) -> None:
    """Print the effective recipe with the source of each value, and the values derived from it."""
    from paceline.config.recipe import effective
    from paceline.plan import batch as plan_batch
    from paceline.plan import layout, passes, schedule

    config, _ = workloads.read_recipe(arguments, ranks)
    workloads.check_own_code(config)
    print(effective(config))
    number = workloads.ranks_of(config) or workloads.DEFAULT_CPU_RANKS
    print(f"\n# derived for {plural(number, 'rank')}:")
    plan = layout.derive_layout(config, number)
    passes.require_allowed(config, plan)
    batch = plan_batch.derive_batch(config, plan)
    rows = {**batch.rows(), "learning rate": schedule.learning_rate(config, batch.size)}
    print("\n".join("# " + line for line in layout.table(rows).splitlines()))
    applied = passes.passes_for(config, plan.degrees)
    print("\n# applied to the model, in this order:")
    width = max(len(each.name) for each in applied)
    for number, each in enumerate(applied, 1):
        print(f"#   {number}. {each.name:<{width}}  {each.reason}")


@app.command("keys", epilog=examples("config keys"))
def keys(
    prefix: Annotated[str, typer.Argument(metavar="[PREFIX]", help="a section, or the beginning of a key")] = "",
    as_json: Json = False,
) -> None:
    """List the keys of recipes with their types, defaults and meaning. Keys are also keywords of the Trainer."""
    found = [key for key in workloads.recipe_keys() if key.name.startswith(prefix)]
    if not found:
        known = [key.name for key in workloads.recipe_keys()]
        raise ConfigError("unknown-key", f"No key begins with {prefix!r}: {did_you_mean(prefix, known)}")
    print(json.dumps([key._asdict() for key in found], indent=2) if as_json else workloads.table(found))


@app.command("schema", epilog=examples("config schema"))
def schema() -> None:
    """Print the JSON schema of recipes, for use in editors."""
    from paceline.config.recipe import Config

    print(json.dumps(Config.json_schema(), indent=2))


def init(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="where to write; default: here")] = Path(),
) -> None:
    """Write a recipe and a script that train a small model of your own, in seconds on a CPU. Nothing is overwritten."""
    contents = {folder / source.stem: source.read_text() for source in sorted(STARTER.glob("*.txt"))}
    existing = [path for path in contents if path.exists() or path.is_symlink()]
    if existing:
        raise ConfigError("file-exists", f"{', '.join(map(str, existing))} already exist{'s' * (len(existing) == 1)}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            with path.open("x") as file:  # another process may have created it by now
                file.write(text)
    except OSError as error:
        what = f"Can't write to {folder}: {error.strerror}."
        raise ConfigError("not-writable", what) from None
    print(f"written: {', '.join(map(str, contents))}\n\nnext:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    print("  paceline train recipe.yaml -n 2\n  paceline launch -n 2 train.py")
