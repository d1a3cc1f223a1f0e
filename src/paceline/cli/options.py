"""The launch options of `paceline launch` and `paceline train`, made from the fields of `LaunchSpec`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

import typer

from paceline.config.launch import LaunchSpec, Option, options_of
from paceline.errors import LaunchError

Verb = TypeVar("Verb", bound=Callable[..., None])


def launch_options(*, without: Collection[str] = ()) -> Callable[[Verb], Verb]:
    """Give a verb that ends in `**options` a parameter for every option of `LaunchSpec`, less the flags in `without`.
    An option that is not given is None."""

    def add(verb: Verb) -> Verb:
        signature = inspect.signature(verb, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        required = [each for each in own if each.default is inspect.Parameter.empty]
        optional = [each for each in own if each not in required]
        # typer reads this one. The launch options come first in --help.
        made = signature.replace(parameters=[*required, *_parameters(without), *optional])
        verb.__signature__ = made  # type: ignore[attr-defined]
        return verb

    return add


def _parameters(without: Collection[str]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=_annotation(option, kind, without),
        )
        for name, (option, kind) in options_of(LaunchSpec).items()
    ]


def _annotation(option: Option, kind: Any, without: Collection[str]) -> Any:
    made = typer.Option(
        *(flag for flag in option.flags if flag not in without),
        help=option.help,
        metavar=option.metavar,
        min=option.ge,
        rich_help_panel=option.panel,
    )
    return Annotated[(str if option.parse else kind) | None, made]


Env = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME[=VALUE]", help="a variable for every rank, on every machine; may be repeated"),
]


def read_env(texts: list[str] | None) -> dict[str, str]:
    """Without a value it is the one that the variable has here."""
    pairs = [text.partition("=") for text in texts or ()]
    missing = [name for name, equals, _ in pairs if not equals and name not in os.environ]
    if missing:
        raise LaunchError(
            "bad-variable", f"--env {missing[0]}: there is no such variable here.", fix="--env NAME=VALUE"
        )
    return {name: value if equals else os.environ[name] for name, equals, value in pairs}
