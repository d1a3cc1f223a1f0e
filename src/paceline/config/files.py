"""Reading recipes: YAML or TOML files, and `dotted.key=value` overrides on top of them."""

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
    """YAML 1.2's idea of a float (PyYAML alone reads `1e-3` as a string), and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Writes what the loader reads back as the same: a string that looks like a float gets quotes."""


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
            f"There is no recipe at {path}.",
            fix="check the path; `paceline train` without a recipe runs the embedded one",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("unreadable", f"The recipe {path} can't be read: {error}.") from None
    values = _parse_toml(text, path) if path.suffix == ".toml" else _parse_yaml(text, path)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(
            "malformed",
            f"The recipe {path} is {_shape(values)}, not a mapping of keys to values.",
            fix="write it as `key: value` lines, e.g. `batch: 64`",
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
        raise ConfigError("malformed", f"The recipe {path} is not YAML{where}: {problem}.") from None
    except ValueError as error:  # a date that does not exist, say
        raise ConfigError("malformed", f"The recipe {path} holds a value that can't be: {error}.") from None
    finally:
        loader.dispose()


def _parse_toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("malformed", f"The recipe {path} is not TOML: {error}.") from None


def _shape(values: Any) -> str:
    return "empty" if values is None else f"a {type(values).__name__}"


def merge(values: Mapping[str, Any], overrides: Sequence[str], origin: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with the overrides applied, and for each dotted key where it came from."""
    merged = _copy(values)
    origins = dict.fromkeys(flatten(merged, keep_empty=True), origin)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or not all(key.split(".")):
            raise ConfigError(
                "bad-override",
                f"The override {override!r} is not of the form key=value.",
                fix="write for instance train.epochs=3",
            )
        value = _parse_yaml(text, Path(f"override {key}"))
        _set(merged, key.split("."), value, override)
        origins = {known: place for known, place in origins.items() if not _covers(key, known)}
        leaves = flatten({key: value}, keep_empty=True)
        origins.update(dict.fromkeys(leaves, f"override {override}"))
    return merged, origins


def _covers(key: str, other: str) -> bool:
    return other == key or other.startswith(key + ".")


def _set(target: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    *parents, last = path
    for depth, name in enumerate(parents):
        if target.get(name) is None:
            target[name] = {}
        inner = target[name]
        if not isinstance(inner, dict):
            raise ConfigError(
                "bad-override",
                f"The override {override!r} goes into {'.'.join(path[: depth + 1])}, which is the value {inner!r}.",
                why="only a section has keys inside it",
            )
        target = inner
    target[last] = value


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
