"""Recipes and scripts from the command line as workloads of a launch."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from paceline import log
from paceline.config.launch import LaunchSpec, options_of
from paceline.errors import ConfigError, LaunchError
from paceline.text import shorten

if TYPE_CHECKING:
    from paceline.config.recipe import Config
    from paceline.launcher.workload import Target, Workload

DEFAULT_CPU_RANKS = 2  # of a recipe
TRAINER = "paceline.train.trainer"  # a module that recipes share


def read_recipe(arguments: list[str] | None, ranks: int | None, *, settled: bool = True) -> tuple[Config, str]:
    """The config and the default name of its run. Without a file, the embedded recipe. Not `settled`: code of the user
    is never imported, and options may be left of a component that an override has replaced."""
    from paceline.config.recipe import Config

    path, overrides = split_arguments(arguments or [])
    if path is not None and Path(path).suffix == ".py":
        raise ConfigError("malformed", f"{path} is a script, not a recipe.", fix=f"run it: paceline launch -n 2 {path}")
    if ranks is not None:
        overrides = [*overrides, f"launch.ranks={ranks}"]
    config = Config.default(overrides) if path is None else Config.from_file(path, overrides)
    if settled and config.inherited:
        from paceline.runtime.processes import call_in_child
        from paceline.train.recipe_objects import drop_inherited_options

        config, notes = drop_inherited_options(config, call_in_child)
        for note in notes:
            log.info(note)
    return config, "gpt" if path is None else Path(path).stem


def check_own_code(config: Config) -> None:
    """Find errors in names of the user's code and their options; nothing is imported for other recipes."""
    from paceline.user_code import is_own

    if any(map(is_own, config.names)):
        from paceline.runtime.processes import call_in_child
        from paceline.train.recipe_objects import check_names

        call_in_child(lambda: check_names(config))


def ranks_of(config: Config) -> int | None:
    """`launch.ranks`, or 1 for single-process strategies."""
    return 1 if config.strategy in ("single", "dp", "split") and config.launch.ranks is None else config.launch.ranks


def recipe_workload(config: Config) -> Workload:
    from paceline.launcher.workload import Workload

    def body() -> None:
        from paceline.tools.cli.train import run_recipe

        run_recipe(config)

    return Workload(body, TRAINER, checked(config), recipe=config.model_dump(mode="json"))


def checked(config: Config) -> Callable[[int], None]:
    """Validates a recipe for a number of ranks, before any of them starts."""

    def prepare(world: int) -> None:
        from paceline.train.recipe_objects import check

        check(config, world)

    return prepare


def script_workload(target: Target) -> Workload:
    from paceline.launcher.workload import Workload

    # If the script uses the Trainer, importing it once saves every rank two seconds.
    shared = TRAINER if target.kind == "script" and _imports_paceline(Path(target.name)) else ""
    own = len(target.args) + 1
    return Workload(target.run, shared, target=target, name=Path(target.name).name, script_arguments=own)


def warn_misplaced_options(target: Target) -> None:
    """Options after the script belong to the script; say so if it does not seem to know them."""
    flags = {flag for option, _ in options_of(LaunchSpec).values() for flag in option.flags}
    given = [each for each in target.args if each.partition("=")[0] in flags]
    if not given or target.kind != "script":
        return
    known = set(re.findall(r"[\w-]+", Path(target.name).read_text(errors="replace")))
    for option in given:
        name = option.partition("=")[0]
        if not {name, name.lstrip("-")} & known:
            words = f"{option} is passed to {target.name}; options of paceline launch are given before the script"
            log.warning(f"{words}: paceline launch {option} … {target.name}")


def require_script(target: Target) -> None:
    """Refuse recipes and folders."""
    path = Path(target.name)
    if target.kind != "script":
        return
    if path.suffix in (".yaml", ".yml", ".toml"):
        raise LaunchError("no-script", f"{path} is not a script.", fix=f"run a recipe: paceline train {path}")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise LaunchError("no-script", f"{path} is a folder without a __main__.py.", fix="pass a script in it")


def split_arguments(arguments: list[str]) -> tuple[str | None, list[str]]:
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


_VALUES = 60  # characters of a type in the table


class RecipeKey(NamedTuple):
    name: str  # dotted
    kind: str
    default: str
    help: str
    choices: tuple[str, ...] = ()


def recipe_keys() -> list[RecipeKey]:
    """All keys, sections after the plain ones."""
    from paceline.config.recipe import Config

    schema = Config.json_schema()
    found = list(_read(schema["properties"], schema["$defs"], ""))
    return sorted(found, key=lambda key: "." in key.name)  # stable: in the order of the recipe


def _read(properties: Mapping[str, Any], sections: Mapping[str, Any], prefix: str) -> Iterator[RecipeKey]:
    for name, each in properties.items():
        options = each.get("anyOf", [each])
        section = next((option["$ref"] for option in options if "$ref" in option), None)
        if section is not None:
            inner = sections[section.rpartition("/")[2]]
            yield from _read(inner["properties"], sections, f"{prefix}{name}.")
            continue
        choices = tuple(str(value) for option in options for value in _values(option) if value)
        yield RecipeKey(
            f"{prefix}{name}",
            " | ".join(dict.fromkeys(_kind(option) for option in options if option.get("type") != "null")),
            json.dumps(each["default"]) if "default" in each else "",
            each.get("description", ""),
            ("true", "false") if each.get("type") == "boolean" else choices,
        )


def _values(option: Mapping[str, Any]) -> list[Any]:
    return list(option.get("enum", [option["const"]] if "const" in option else []))


def _kind(option: Mapping[str, Any]) -> str:
    if _values(option):
        return " | ".join(map(str, _values(option)))
    names = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "object": "dict"}
    kind = option.get("type", "any")
    return f"list of {_kind(option['items'])}" if kind == "array" and "items" in option else names.get(kind, kind)


def table(keys: list[RecipeKey]) -> str:
    """The keys, grouped by section: key, type, default, help."""
    lines: list[str] = []
    section = None
    for key in keys:
        own, _, name = key.name.rpartition(".")
        if own != section:
            lines += ["", f"{own}:"] if own else []
            section = own
        shown = f"{'  ' if own else ''}{name}"
        default = f" = {key.default}" if key.default and key.default != "null" else ""
        lines += [f"{shown:<24} {shorten(key.kind, _VALUES)}{default}", f"{'':<24}   {key.help}"]
    return "\n".join(lines)


def complete(incomplete: str) -> list[str]:
    """Recipes in this folder, keys and their values, for a word that begins so."""
    name, equals, _ = incomplete.partition("=")
    keys = recipe_keys()
    if equals:
        return [f"{name}={choice}" for key in keys if key.name == name for choice in key.choices]
    folder = Path(incomplete if incomplete.endswith("/") else incomplete.rpartition("/")[0] or ".")
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [str(path) for path in entries if path.suffix in (".yaml", ".yml", ".toml")]
    files += [f"{path}/" for path in entries if path.is_dir() and not path.name.startswith(".")]
    words = [*(f"{key.name}=" for key in keys), *files]
    return [word for word in words if word.startswith(incomplete)]


Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="recipe file, and overrides", autocompletion=complete),
]
