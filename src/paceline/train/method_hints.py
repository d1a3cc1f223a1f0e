"""Unknown methods of the Trainer, and arguments of train(), that other frameworks have: the error says what to use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from paceline.config.foreign_names import find_hint
from paceline.config.recipe import Config
from paceline.errors import ConfigError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def hinted(method: Callable[P, R]) -> Callable[P, R]:
    """Unknown keyword arguments of the method get a hint instead of Python's TypeError."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise ConfigError(
                    "unknown-key",
                    f"{method.__name__}() has no argument {name!r}.",
                    why=f"its arguments are {', '.join(known)}; everything else is set in Trainer(…)",
                    fix=_instead(name, kwargs[name], known),
                )
        return method(*args, **kwargs)

    return call


def _instead(name: str, value: object, known: list[str]) -> str:
    shown = repr(value) if isinstance(value, (int, float, str)) else "…"
    if name in Config.model_fields:
        return f"pass it to the Trainer: Trainer(…, {name}={shown})"
    if ours := find_hint("arguments", name):
        return f"use {ours}={shown}"
    return find_hint("settings", name) or did_you_mean(name, known)


class MethodHints:
    if not TYPE_CHECKING:  # for type checkers, unknown attributes remain errors

        def __getattr__(self, name: str) -> Any:
            hint = find_hint("methods", name)
            words = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{words}; use {hint}" if hint else words, name=name, obj=self)
