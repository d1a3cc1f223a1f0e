"""Components that a recipe selects by name: facts about each, and the function that builds it.

    OPTIMIZERS.declare("adamw", OptimizerFacts(…))      config/components.py, which does not import torch

    @OPTIMIZERS.implement("adamw")                      optim/optimizers.py
    def adamw(params, settings, lr): …

Models and datasets have no facts, only implementations. The parameters of an implementation are the options that a
recipe may set for it. A name with a colon is a function or class of the user's code, imported on first use
(`user_code.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from paceline import user_code
from paceline.errors import did_you_mean

Facts = TypeVar("Facts")
Built = TypeVar("Built")
Builder = TypeVar("Builder", bound=Callable[..., Any])


class Registry(Generic[Facts, Built]):
    """`kind` and `hint` appear in errors: the kind of component and how users register one. `load` imports the modules
    that implement the built-in ones, and `skip` is the number of leading parameters that are not options.

    `error` builds the exception of a failed lookup. Names of components with facts are validated when a recipe is
    read, so for these a failed lookup is a bug.
    """

    def __init__(
        self,
        kind: str,
        *,
        error: Callable[..., Exception] = lambda code, what, **rest: LookupError(what),
        hint: str = "",
        load: Callable[[], object] = lambda: None,
        skip: int = 0,
    ) -> None:
        self.kind = kind
        self._error, self._hint, self._load, self._skip = error, hint, load, skip
        self._facts: dict[str, Facts] = {}
        self._builders: dict[str, Callable[..., Built]] = {}

    def declare(self, name: str, facts: Facts) -> None:
        self._facts[name] = facts

    def implement(self, name: str) -> Callable[[Builder], Builder]:
        """Decorator that registers a class or function under a name. Its parameters are the options in a recipe."""

        def add(builder: Builder) -> Builder:
            self._require(callable(builder), builder)
            self._builders[name] = builder
            return builder

        self._require(isinstance(name, str), name)
        return add

    def _require(self, fits: bool, got: Any) -> None:
        if not fits:
            what = f"Expected a name and a function or class for a {self.kind}, got {got!r}."
            raise self._error("bad-registration", what, fix=f'write {self._hint}("name") above a function or class')

    @property
    def declared(self) -> list[str]:
        """Names with facts, in order of declaration."""
        return list(self._facts)

    @property
    def implemented(self) -> list[str]:
        return list(self._builders)

    def facts(self, name: str) -> Facts:
        return self._facts[name]

    def options(self, name: str) -> list[str] | None:
        """The options that a recipe may set for a component; None: any option."""
        if name not in self._builders:  # declared, but its implementation is not imported
            return []
        parameters = self._parameters(name)
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        return None if takes_any else [parameter.name for parameter in parameters]

    def _parameters(self, name: str) -> list[inspect.Parameter]:
        try:
            return list(inspect.signature(self._builders[name]).parameters.values())[self._skip :]
        except ValueError:  # some functions of extension modules do not tell
            return [inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]

    def import_own(self, name: str, folder: str | None) -> None:
        """Register a function or class of the user's code under its name in a recipe, which is in `folder`."""
        self._builders[name] = user_code.load(name, folder)

    def find(self, name: str, options: Iterable[str] | None = None) -> Callable[..., Built]:
        """The implementation of that name; raises unless it can be called with these options."""
        self._load()
        if user_code.is_own(name) and name not in self._builders:
            self.import_own(name, None)
        if name not in self._builders:
            what = f"Unknown {self.kind} {name!r}: {did_you_mean(name, self._builders)}"
            raise self._error(
                "unknown-name", what, fix=f"register your own with {self._hint}, or name it as module:function"
            )
        if options is None:
            return self._builders[name]
        given, known = set(options), self.options(name)
        for option in given.difference(given if known is None else known):
            what = f"Unknown option {option!r} for {self.kind} {name!r}: {did_you_mean(option, known or ())}"
            raise self._error("unknown-option", what)
        missing = [p.name for p in self._parameters(name) if p.default is p.empty and "VAR" not in p.kind.name]
        for option in (each for each in missing if each not in given):
            what = f"The {self.kind} {name!r} requires the option {option!r} ({self.place(name)})."
            raise self._error("missing-option", what, fix=f"set it in the recipe: {{name: {name}, {option}: …}}")
        return self._builders[name]

    def place(self, name: str) -> str:
        """The implementation and the line on which it starts, for errors."""
        builder: Any = self._builders[name]
        called = getattr(builder, "__qualname__", repr(builder))
        try:
            return f"{called}, {inspect.getsourcefile(builder)}:{inspect.getsourcelines(builder)[1]}"
        except (OSError, TypeError):  # typed into an interpreter
            return called
