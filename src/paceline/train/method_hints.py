"""Unknown methods of the Trainer, and arguments of train(), that other frameworks have: the error says what to use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paceline.config.foreign_names import find_hint
from paceline.config.recipe import Config
from paceline.config.validation import explain_argument

Method = TypeVar("Method", bound=Callable[..., Any])


def hinted(method: Method) -> Method:
    """Unknown keyword arguments of the method get a hint instead of Python's TypeError."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs.keys() - known:
            raise explain_argument(method.__name__, name, kwargs[name], known, Config.model_fields)
        return method(*args, **kwargs)

    return cast("Method", call)


class MethodHints:
    if not TYPE_CHECKING:  # for type checkers, unknown attributes remain errors

        def __getattr__(self, name: str) -> Any:
            hint = find_hint("methods", name)
            words = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{words}; use {hint}" if hint else words, name=name, obj=self)
