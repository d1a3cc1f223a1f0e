"""Turn pydantic's validation errors into one readable error."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from paceline.config.foreign_names import find_hint, suggest, suggest_value
from paceline.errors import ConfigError, did_you_mean
from paceline.text import shorten

KEYWORDS = "Trainer's keywords"  # the origin of settings that are not part of a recipe
_SHOWN = 20  # findings
_WIDTH = 200  # of a value


def explain(error: ValidationError, schema: type[BaseModel], origins: Mapping[str, str]) -> ConfigError:
    """One error for all findings, with the code of the first one."""
    findings, fixes = error.errors(include_url=False), dict[str, tuple[str, str]]()
    for finding in findings[:_SHOWN]:
        place = ".".join(part for part in finding["loc"] if _is_key(part, finding["loc"]))
        problem, expected, fix = _describe(finding, place, schema)
        fixes.setdefault(f"{problem} ({_origin(place, origins)[:_WIDTH]}){expected}", (place[:_WIDTH], fix))
    lines = list(fixes)
    if len(findings) > _SHOWN:
        lines.append(f"and {len(findings) - _SHOWN} others")
    return ConfigError(
        "unknown-key" if findings[0]["type"] == "extra_forbidden" else "bad-value",
        f"Invalid {'settings' if set(origins.values()) == {KEYWORDS} else 'recipe'}:\n    " + "\n    ".join(lines),
        fix="\n    ".join(fix if len(fixes) == 1 else f"{place}: {fix}" for place, fix in fixes.values()),
    )


def explain_argument(method: str, name: str, value: object, known: list[str], settings: Collection[str]) -> ConfigError:
    """The error for an unknown argument of a method of the Trainer."""
    shown = repr(value) if isinstance(value, (int, float, str)) else "…"
    fix = find_hint("settings", name) or did_you_mean(name, known)
    if name in settings:
        fix = f"pass it to the Trainer: Trainer(…, {name}={shown})"
    elif ours := find_hint("arguments", name):
        fix = f"use {ours}={shown}"
    why = f"its arguments are {', '.join(known)}; everything else is set in Trainer(…)"
    return ConfigError("unknown-key", f"{method}() has no argument {name!r}.", why=why, fix=fix)


def _describe(finding: ErrorDetails, place: str, schema: type[BaseModel]) -> tuple[str, str, str]:
    """What is wrong, what was expected, and what to write instead."""
    *section, key = place.split(".")
    shown, value = _shown(place), finding["input"]
    if finding["type"] == "extra_forbidden":
        hint = suggest("settings", key, _known_keys(schema, section))
        return f"unknown key {shown}", "", re.sub("^known:", "use one of", hint)
    if finding["type"] == "model_type":
        example = f"{place}.{_known_keys(schema, place.split('.'))[0]}"
        return f"{shown} is {_shown(value)}", f": expected a section, e.g. {example}", f"set {example} instead"
    if finding["type"] == "no_effect":
        fix = f"set {finding['ctx']['needed']}, or remove {place}"
        return f"{shown} is {_shown(value)}", f": {finding['msg']}", fix
    message = finding["msg"].removeprefix("Value error, ").partition(", unable to")[0].replace("a valid ", "a ")
    message = message.replace("Input should be less", "expected a value less").replace("Input should be", "expected")
    message = message.replace("expected greater", "expected a value greater")
    message = message[:1].lower() + message[1:]
    names = re.findall(r"'([^']+)'", message) if finding["type"] == "literal_error" else []
    hint = suggest_value(value, names) if isinstance(value, str) else ""
    wanted = message.removeprefix("expected ")
    hint = hint or (f"set {place[:_WIDTH]} to {wanted}" if wanted != message else f"change {place[:_WIDTH]}")
    return f"{shown} is {_shown(value)}", f": {message}", hint


def _shown(value: Any) -> str:
    return shorten(repr(value), _WIDTH)


def _is_key(part: Any, location: tuple[Any, ...]) -> TypeGuard[str]:
    """Not the index in a list, nor the union member that pydantic tried (`int`, `bool`) and appends to the path."""
    if part is location[0] or not isinstance(part, str):
        return isinstance(part, str)
    return part not in {"int", "float", "str", "bool", "none"} and not part.startswith(("constrained-", "literal["))


def _known_keys(schema: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = schema.model_fields.get(part)
        section = None if field is None else _section(field.annotation)
        if section is None:
            return []
        schema = section
    return list(schema.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section type of a field, also if it is optional: `Ema | None`."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def _origin(place: str, origins: Mapping[str, str]) -> str:
    for key, origin in origins.items():
        if key == place or key.startswith(place + ".") or place.startswith(key + "."):
            return origin
    return "default"
