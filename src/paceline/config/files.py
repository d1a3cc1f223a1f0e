"""Read recipes from YAML or TOML files, and apply `dotted.key=value` overrides."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import ConfigError
from paceline.text import flatten


class _Loader(yaml.SafeLoader):
    """Floats of YAML 1.2 (PyYAML reads `1e-3` as a string), and no duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value!r}", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes strings that the loader would read as floats."""


for _kind in (_Loader, Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)$"),
        list("-+0123456789."),
    )


def read(path: Path) -> dict[str, Any]:
    """The mapping in a recipe file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "missing-file",
            f"Recipe not found: {path}.",
            fix="check the path; `paceline train` without a recipe runs the default one",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("unreadable", f"Cannot read recipe {path}: {error}.") from None
    values = _parse_toml(text, path) if path.suffix == ".toml" else _parse_yaml(text, path)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        kind = "an empty file" if values is None else type(values).__name__
        raise ConfigError(
            "malformed",
            f"Invalid recipe {path}: expected a mapping, got {kind}.",
            fix="write `key: value` lines, e.g. `batch: 64`",
        )
    return values


def _parse_yaml(text: str, path: Path) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError("malformed", f"Invalid YAML in {path}{where}: {problem}.") from None
    except ValueError as error:  # e.g. an invalid date
        raise ConfigError("malformed", f"Invalid value in {path}: {error}.") from None
    finally:
        loader.dispose()


def _parse_toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("malformed", f"Invalid TOML in {path}: {error}.") from None


def merge(
    values: Mapping[str, Any], overrides: Sequence[str], origin: str, shorthands: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with the overrides applied, and the origin of each dotted key. `shorthands` are sections that may be
    given as the value of one of their keys: `ema.warmup=false` completes `ema: 0.9`."""
    merged = _copy(values)
    origins = dict.fromkeys(flatten(merged, keep_empty=True), origin)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(
                "bad-override", f"Invalid override {override!r}: expected key=value.", fix="write e.g. train.epochs=3"
            )
        value = _parse_yaml(text, Path(f"override {key}"))
        first = key.split(".")[0]
        if first != key and first in shorthands and isinstance(merged.get(first), (int, float, str)):
            merged[first] = {shorthands[first]: merged[first]}
            origins[f"{first}.{shorthands[first]}"] = origins.pop(first)
        _set(merged, key.split("."), value, override)
        origins = {known: place for known, place in origins.items() if not f"{known}.".startswith(f"{key}.")}
        leaves = flatten({key: value}, keep_empty=True)
        origins.update(dict.fromkeys(leaves, f"override {override}"))
    return merged, origins


def _set(target: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    *parents, last = path
    for depth, name in enumerate(parents):
        if target.get(name) is None:
            target[name] = {}
        inner = target[name]
        if not isinstance(inner, dict):
            raise ConfigError(
                "bad-override",
                f"Invalid override {override!r}: {'.'.join(path[: depth + 1])} is the value {inner!r}, not a section.",
            )
        target = inner
    target[last] = value


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
