"""Recipes and scripts from the command line as workloads of a launch."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.config.recipe import Config
    from paceline.launcher.workload import Target, Workload

DEFAULT_CPU_RANKS = 2  # of a recipe
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="recipe file, and overrides"),
]


def read_recipe(arguments: list[str] | None, ranks: int | None) -> tuple[Config, str]:
    """The config and the default name of its run. Without a file, the embedded recipe."""
    from paceline.config.recipe import Config

    path, overrides = _split(arguments or [])
    if ranks is not None:
        overrides = [*overrides, f"launch.ranks={ranks}"]
    if path is None:
        return Config.default(overrides), "gpt"
    return Config.from_file(path, overrides), Path(path).stem


def ranks_of(config: Config) -> int | None:
    """`launch.ranks`, or 1 for single-process strategies."""
    return 1 if config.strategy in ("single", "dp", "split") and config.launch.ranks is None else config.launch.ranks


def recipe_workload(config: Config) -> Workload:
    from paceline.launcher.workload import Workload

    def body() -> None:
        from paceline.cli.run_recipe import run_recipe

        run_recipe(config)

    def preload() -> None:
        import paceline.cli.run_recipe  # noqa: F401

    def prepare(world: int) -> None:
        """Validate the recipe before any rank starts."""
        from paceline.train.factory import check

        check(config, world)

    return Workload(body, preload, prepare, recipe=config.model_dump(mode="json"))


def script_workload(target: Target) -> Workload:
    from paceline.launcher.workload import Workload

    def preload() -> None:
        """Import the Trainer once if the script uses it, which saves every rank two seconds."""
        if target.kind == "script" and _imports_paceline(Path(target.name)):
            import paceline.train.trainer  # noqa: F401

    return Workload(target.run, preload, target=target)


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The recipe file, if any, and the overrides."""
    recipes = [argument for argument in arguments if "=" not in argument or Path(argument).is_file()]
    if len(recipes) > 1:
        raise ConfigError(
            "bad-override",
            f"Expected one recipe, got {recipes[0]} and {recipes[1]}.",
            fix="write overrides as key=value",
        )
    return next(iter(recipes), None), [argument for argument in arguments if argument not in recipes]


def _imports_paceline(script: Path) -> bool:
    """Whether the script imports paceline at its top level."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # the ranks report the error
    names = [name.name for each in statements if isinstance(each, ast.Import) for name in each.names]
    names += [each.module or "" for each in statements if isinstance(each, ast.ImportFrom)]
    return any(name.split(".")[0] == "paceline" for name in names)
