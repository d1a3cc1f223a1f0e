"""Turn pydantic's validation errors into one readable error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from paceline.config.foreign_names import suggest
from paceline.errors import ConfigError

KEYWORDS = "Trainer's keywords"  # the origin of settings that are not part of a recipe
_SHOWN = 20  # findings
_WIDTH = 200  # of a value


def explain(error: ValidationError, schema: type[BaseModel], origins: Mapping[str, str]) -> ConfigError:
    """One error for all findings, with the code of the first one."""
    findings, lines = error.errors(include_url=False), list[str]()
    for finding in findings[:_SHOWN]:
        place = ".".join(str(part) for part in finding["loc"] if not _is_union_branch(part, finding["loc"]))
        shown, came_from = _shown(place), _origin(place, origins)[:_WIDTH]
        if finding["type"] == "extra_forbidden":
            hint = suggest("settings", place.rsplit(".", 1)[-1], _known_keys(schema, place.split(".")[:-1]))
            line = f"unknown key {shown} ({came_from}): {hint}"
        elif finding["type"] == "model_type":
            keys = _known_keys(schema, place.split("."))
            line = f"{shown} is {_shown(finding['input'])} ({came_from}): expected a section, e.g. {place}.{keys[0]}"
        else:
            message = finding["msg"][:1].lower() + finding["msg"][1:]
            line = f"{shown} is {_shown(finding['input'])} ({came_from}): {message}"
        if line not in lines:
            lines.append(line)
    if len(findings) > _SHOWN:
        lines.append(f"and {len(findings) - _SHOWN} others")
    return ConfigError(
        "unknown-key" if findings[0]["type"] == "extra_forbidden" else "bad-value",
        f"Invalid {'settings' if set(origins.values()) == {KEYWORDS} else 'recipe'}:\n    " + "\n    ".join(lines),
        fix="run `paceline config schema` for a description of every key",
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def _is_union_branch(part: Any, location: tuple[Any, ...]) -> bool:
    """pydantic appends the union member that it tried (`int`, `bool`) to the path."""
    if part is location[0] or not isinstance(part, str):
        return False
    return part in {"int", "float", "str", "bool", "none"} or part.startswith(("constrained-", "literal["))


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
