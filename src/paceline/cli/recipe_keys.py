"""The keys of recipes for people: as a table for `paceline config keys`, and for the completion of the shell."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
        choices = tuple(
            str(value) for option in options for value in option.get("enum", [option.get("const")]) if value
        )
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
        kind = key.kind if len(key.kind) <= _VALUES else f"{key.kind[: _VALUES - 1]}…"
        shown = f"{'  ' if own else ''}{name}"
        default = f" = {key.default}" if key.default and key.default != "null" else ""
        lines += [f"{shown:<24} {kind}{default}", f"{'':<24}   {key.help}"]
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
