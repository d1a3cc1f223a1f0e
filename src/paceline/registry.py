"""Things that a recipe picks by name: a registry of makers, whose parameters are the options that may be given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from paceline.errors import PacelineError, did_you_mean

Made = TypeVar("Made")
Maker = TypeVar("Maker", bound=Callable[..., Any])


class Registry(Generic[Made]):
    """`kind` is what a person calls such a thing; `load` imports the modules that register the embedded ones."""

    def __init__(self, kind: str, error: type[PacelineError], load: Callable[[], object], own: str) -> None:
        self._kind, self._error, self._load, self._own = kind, error, load, own
        self._makers: dict[str, Callable[..., Made]] = {}

    def register(self, name: str) -> Callable[[Maker], Maker]:
        def add(maker: Maker) -> Maker:
            self._makers[name] = maker
            return maker

        return add

    def find(self, name: str, options: Mapping[str, Any]) -> Callable[..., Made]:
        """The maker of that name, if it takes these options."""
        self._load()
        if name not in self._makers:
            raise self._error(
                "unknown-name",
                f"There is no {self._kind} named {name!r}: {did_you_mean(name, self._makers)}",
                fix=f"register your own with {self._own}",
            )
        maker = self._makers[name]
        known = inspect.signature(maker).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        for option in options:
            if option not in known and not takes_any:
                raise self._error(
                    "unknown-option",
                    f"The {self._kind} {name!r} has no option {option!r}: {did_you_mean(option, known)}",
                )
        return maker
