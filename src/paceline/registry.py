"""Components that a recipe picks by name: facts about each, and the code that builds it.

    OPTIMIZERS.declare("adamw", OptimizerFacts(…))      config/components.py, without torch

    @OPTIMIZERS.implement("adamw")                      optim/optimizers.py
    def adamw(params, settings, lr): …

Models and datasets have no facts: `implement` alone registers them. The parameters of an implementation are the options
that a recipe may set for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from paceline.errors import did_you_mean

Facts = TypeVar("Facts")
Built = TypeVar("Built")
Builder = TypeVar("Builder", bound=Callable[..., Any])


class Registry(Generic[Facts, Built]):
    """`kind` is what users call such a component, `own` how they register one, `load` imports the modules that
    implement the built-in ones, and `passed` is the number of leading arguments that are not options of a recipe.

    `error` builds the exception of a failed lookup. Names of components with facts are validated when a recipe is
    read, so that only code can look up a wrong one.
    """

    def __init__(
        self,
        kind: str,
        *,
        error: Callable[..., Exception] = lambda code, what, **rest: LookupError(what),
        own: str = "",
        load: Callable[[], object] = lambda: None,
        passed: int = 0,
    ) -> None:
        self.kind = kind
        self._error, self._own, self._load, self._passed = error, own, load, passed
        self._facts: dict[str, Facts] = {}
        self._builders: dict[str, Callable[..., Built]] = {}

    def declare(self, name: str, facts: Facts) -> None:
        self._facts[name] = facts

    def implement(self, name: str) -> Callable[[Builder], Builder]:
        def add(builder: Builder) -> Builder:
            self._builders[name] = builder
            return builder

        return add

    @property
    def declared(self) -> list[str]:
        """Names with facts, in the order of their declaration."""
        return list(self._facts)

    @property
    def implemented(self) -> list[str]:
        return list(self._builders)

    def facts(self, name: str) -> Facts:
        return self._facts[name]

    def options(self, name: str) -> list[str] | None:
        """The options that a recipe may set for a component; None: any."""
        if name not in self._builders:  # declared, and implemented where torch is at hand
            return []
        parameters = list(inspect.signature(self._builders[name]).parameters.values())[self._passed :]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        return None if takes_any else [parameter.name for parameter in parameters]

    def find(self, name: str, options: Iterable[str] = ()) -> Callable[..., Built]:
        """The implementation of that name, if it takes these options."""
        self._load()
        if name not in self._builders:
            raise self._error(
                "unknown-name",
                f"There is no {self.kind} named {name!r}: {did_you_mean(name, self._builders)}",
                fix=f"register your own with {self._own}",
            )
        for option in options:
            known = self.options(name)
            if known is not None and option not in known:
                raise self._error(
                    "unknown-option",
                    f"The {self.kind} {name!r} has no option {option!r}: {did_you_mean(option, known)}",
                )
        return self._builders[name]
