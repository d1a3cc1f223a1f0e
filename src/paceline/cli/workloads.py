"""What a person wants to run, a recipe or a script, as the workload of a launch."""

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
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="a recipe file, and changes to it"),
]


def read_recipe(arguments: list[str] | None, ranks: int | None) -> tuple[Config, str]:
    """The config that the arguments describe, and a name for its run. Without a file, the embedded recipe."""
    from paceline.config.recipe import Config

    path, overrides = _split(arguments or [])
    if ranks is not None:
        overrides = [*overrides, f"launch.ranks={ranks}"]
    if path is None:
        return Config.default(overrides), "gpt"
    return Config.from_file(path, overrides), Path(path).stem


def ranks_of(config: Config) -> int | None:
    """As set; one, where the strategy is of one process."""
    return 1 if config.strategy in ("single", "dp", "split") and config.launch.ranks is None else config.launch.ranks


def recipe_workload(config: Config) -> Workload:
    from paceline.launcher.workload import Workload

    def body() -> None:
        from paceline.cli.run_recipe import run_recipe

        run_recipe(config)

    def preload() -> None:
        import paceline.cli.run_recipe  # noqa: F401

    def prepare(world: int) -> None:
        """Find what is wrong before any rank starts."""
        from paceline.train.factory import check

        check(config, world)

    return Workload(body, preload, prepare, recipe=config.model_dump(mode="json"))


def script_workload(target: Target) -> Workload:
    from paceline.launcher.workload import Workload

    def preload() -> None:
        """The Trainer, where the script uses it: two seconds that each rank would spend at every start."""
        if target.kind == "script" and _imports_paceline(Path(target.name)):
            import paceline.train.trainer  # noqa: F401

    return Workload(target.run, preload, target=target)


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The recipe, if one of the arguments is one, and the overrides."""
    recipes = [argument for argument in arguments if "=" not in argument or Path(argument).is_file()]
    if len(recipes) > 1:
        raise ConfigError(
            "bad-override", f"{recipes[0]} and {recipes[1]} are two recipes.", fix="changes are written key=value"
        )
    return next(iter(recipes), None), [argument for argument in arguments if argument not in recipes]


def _imports_paceline(script: Path) -> bool:
    """Whether it says so at its top level."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # the ranks will tell
    names = [name.name for each in statements if isinstance(each, ast.Import) for name in each.names]
    names += [each.module or "" for each in statements if isinstance(each, ast.ImportFrom)]
    return any(name.split(".")[0] == "paceline" for name in names)
