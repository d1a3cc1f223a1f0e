"""The launch options of `paceline launch` and `paceline train`, generated from the fields of `LaunchSpec`."""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Collection
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand

from paceline.config.foreign_names import find_hint
from paceline.config.launch import LaunchSpec, options_of
from paceline.errors import LaunchError

Verb = TypeVar("Verb", bound=Callable[..., None])
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


_EXAMPLES = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))


def examples(command: str) -> str:
    """The end of a --help page. typer keeps lines apart only if a blank line is between them."""
    return "\n\n".join(["Examples:", *(f"paceline {each}" for each in _EXAMPLES[command].splitlines())])


class HintedCommand(TyperCommand):
    """Options of other launchers get a hint instead of "No such option"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # NoSuchOption of click, or of the copy of click in newer versions of typer
            name = getattr(error, "option_name", "")
            if hint := find_hint("options", name):
                raise LaunchError("bad-options", f"Unknown option {name}.", fix=hint) from None
            _require_number(getattr(error, "param", None), given)
            raise


def _require_number(param: Any, given: list[str]) -> None:
    """Raise an error in plain words if the value of a numeric option is a word."""
    kind = options_of(LaunchSpec).get(getattr(param, "name", ""), (None, None))[1]
    if not {int, float} & {kind, *get_args(kind)}:
        return
    flag, value = next(((flag, value) for flag, value in pairwise(given) if flag in param.opts), ("", "0"))
    if flag and not re.fullmatch(r"[-+.\d]+", value):
        omitted = "omit it for one rank per GPU, or pass" if "-n" in param.opts else "pass"
        raise LaunchError(
            "bad-options", f"{flag} expects a number, got {value!r}.", fix=f"{omitted} a number: {flag} 2"
        ) from None


def launch_options(*, without: Collection[str] = ()) -> Callable[[Verb], Verb]:
    """Add a parameter for every option of `LaunchSpec` to a command that takes `**options`, except the flags in
    `without`. Options that are not given are None."""

    def add(verb: Verb) -> Verb:
        signature = inspect.signature(verb, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        required = [each for each in own if each.default is inspect.Parameter.empty]
        optional = [each for each in own if each not in required]
        # Read by typer. The launch options come first in --help.
        made = signature.replace(parameters=[*required, *_parameters(without), *optional])
        verb.__signature__ = made  # type: ignore[attr-defined]
        return verb

    return add


def _parameters(without: Collection[str]) -> list[inspect.Parameter]:
    found = []
    for name, (option, kind) in options_of(LaunchSpec).items():
        if flags := [flag for flag in option.flags if flag not in without]:
            details: dict[str, Any] = {"metavar": option.metavar, "min": option.ge, "rich_help_panel": option.panel}
            made = typer.Option(*flags, help=option.help, **details)
            either, value = inspect.Parameter.POSITIONAL_OR_KEYWORD, str if option.parse else kind
            found.append(inspect.Parameter(name, either, default=None, annotation=Annotated[value | None, made]))
    return found


Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env", metavar="NAME[=VALUE]", help="environment variable for every rank on every node; may be repeated"
    ),
]


def read_env(texts: list[str] | None) -> dict[str, str]:
    """Parse `NAME=VALUE`, or `NAME` for the value in the current environment."""
    pairs = [text.partition("=") for text in texts or ()]
    missing = [name for name, equals, _ in pairs if not equals and name not in os.environ]
    if missing:
        raise LaunchError(
            "bad-variable", f"--env {missing[0]}: variable not set in this environment.", fix="pass --env NAME=VALUE"
        )
    return {name: value if equals else os.environ[name] for name, equals, value in pairs}
