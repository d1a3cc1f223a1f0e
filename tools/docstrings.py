"""The docstrings of public names: which names there are, and the parts of a docstring in Google style."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import paceline
from paceline import testing

SECTIONS = ("Args", "Settings", "Attributes", "Returns", "Yields", "Raises", "Example")
WITH_ITEMS = ("Args", "Settings", "Attributes", "Raises")


@dataclass
class Docstring:
    """The text before the sections, and the sections: of `WITH_ITEMS` the items by name, of others their text."""

    text: str = ""
    items: dict[str, dict[str, str]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> Docstring:
    """Read a docstring whose indentation is removed."""
    found = Docstring()
    heads = list(re.finditer(rf"^({'|'.join(SECTIONS)}):$", text, re.M))
    found.text = text[: heads[0].start() if heads else None].strip()
    for head, following in zip_longest(heads, heads[1:]):
        body = inspect.cleandoc("\n" + text[head.end() : following.start() if following else None]).strip()
        if head[1] in WITH_ITEMS:
            found.items[head[1]] = dict(_items(body))
        else:
            found.parts[head[1]] = body
    return found


def _items(body: str) -> Iterator[tuple[str, str]]:
    """`name: text` at the margin; further lines of an item are indented."""
    for item in re.split(r"\n(?=\S)", body):
        names, _, text = item.partition(":")
        for name in names.split(","):
            yield name.strip().lstrip("*"), " ".join(text.split())


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature as it is written. (That of a pydantic model would list its fields.)"""
    if isinstance(function, type):
        own = [vars(kind).get("__init__") for kind in function.__mro__ if kind.__module__.startswith("paceline.")]
        function = next((each for each in own if each), function)
    try:
        return inspect.signature(function)
    except ValueError:  # of a builtin, such as the class of an exception
        return inspect.Signature()


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names of a callable's parameters, without `self`."""
    return [name for name in signature_of(function).parameters if name not in ("self", "cls")]


def public_names() -> dict[str, Any]:
    """Every public name with its object: those of `paceline`, the functions and classes of its public modules, and the
    public methods and properties of classes."""
    found: dict[str, Any] = {}
    for name in [*paceline.__all__, "testing"]:
        value = getattr(paceline, name)
        found[f"paceline.{name}"] = value
        if isinstance(value, types.ModuleType):
            inner = {each: getattr(value, each) for each in module_names(value)}
            found |= {f"paceline.{name}.{each}": made for each, made in inner.items()}
    kinds = {name: value for name, value in found.items() if isinstance(value, type)}
    for name, kind in kinds.items():
        without = [each for each in kinds.values() if each is not kind]
        found |= {f"{name}.{member}": made for member, made in members(kind, without)}
    return found


def module_names(module: types.ModuleType) -> list[str]:
    if module is testing:
        return list(testing.__all__)
    public = type if module is paceline.errors else (type, types.FunctionType)
    own = {name: value for name, value in vars(module).items() if isinstance(value, public)}
    return sorted(name for name in own if own[name].__module__.startswith("paceline.") and not name.startswith("_"))


def members(kind: type, without: Collection[type] = ()) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that classes of paceline define, except those of the classes in `without`."""
    seen = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("paceline.") or base in without:
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(value, property):
                yield name, value
            elif isinstance(value, types.FunctionType | classmethod | staticmethod):
                made = getattr(kind, name)
                if made.__module__.startswith("paceline."):  # not what pydantic adds
                    yield name, made


def doc(value: Any) -> str:
    """The docstring of a public object itself; not one that a class inherits from another package."""
    own = value.__dict__.get("__doc__") if isinstance(value, type) else value.__doc__
    return inspect.cleandoc(own or "")


def unpacked(function: Callable[..., Any]) -> list[str]:
    """The keywords behind `**settings: Unpack[…]`."""
    hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
    for hint in hints.values():
        if typing.get_origin(hint) is typing.Unpack:
            return sorted(typing.get_type_hints(typing.get_args(hint)[0]))
    return []
