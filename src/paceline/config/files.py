"""Read recipes from YAML or TOML files, and apply `dotted.key=value` overrides.

Whatever a recipe from somebody else contains, reading it takes little time and memory.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import ConfigError
from paceline.text import flatten

_MAX_BYTES = 1 << 17  # PyYAML parses about 100 kB per second
_MAX_VALUES, _MAX_DEPTH = 20_000, 32
_MAX_SHOWN = 200  # characters in a message


class _Loader(yaml.SafeLoader):
    """Floats of YAML 1.2 (PyYAML reads `1e-3` as a string), no duplicate keys, and a limit on the number of values."""

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text)
        self._place, self._nodes = place, 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        if self._nodes > _MAX_VALUES:  # before the rest is parsed, which takes most of the time
            raise _too_large(self._place)
        return super().compose_node(parent, index)

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


def read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in a recipe file, and the line of each dotted key."""
    try:
        text = _read_small(path).decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            "missing-file",
            f"Recipe not found: {path}.",
            fix="check the path; `paceline train` without a recipe runs the default one",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError("unreadable", f"Cannot read recipe {path}: {error}.") from None
    values, lines = _parse_toml(text, path) if path.suffix == ".toml" else _parse_yaml(text, path)
    _require_plain(values, str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        kind = "an empty file" if values is None else type(values).__name__
        raise ConfigError(
            "malformed",
            f"Invalid recipe {path}: expected a mapping, got {kind}.",
            fix="write `key: value` lines, e.g. `batch: 64`",
        )
    return values, lines


def _read_small(path: Path) -> bytes:
    """The contents of a regular file; a pipe could block, and a device never end."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > _MAX_BYTES:
            raise ValueError(f"it has {found.st_size} bytes, the limit is {_MAX_BYTES}")
        return file.read(_MAX_BYTES)


def _parse_yaml(text: str, path: Path) -> tuple[Any, dict[str, int]]:
    loader = None
    if len(text) > _MAX_BYTES:
        raise ConfigError("malformed", f"{path} has {len(text)} characters, the limit is {_MAX_BYTES}.")
    try:
        loader = _Loader(text, str(path))
        node = loader.get_single_node()
        deque(_every_value(node, str(path)), maxlen=0)  # before aliases are expanded, also by `<<`
        return (None, {}) if node is None else (loader.construct_document(node), _key_lines(node))
    except RecursionError:
        raise _too_large(str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = (getattr(error, "problem", None) or str(error))[:_MAX_SHOWN]
        indented, fix = _indentation(text, mark.line, mark.column) if mark else "", ""
        if indented:
            problem, fix = indented, "indent the keys of a section alike; top-level keys start in column 1"
        raise ConfigError("malformed", f"Invalid YAML in {path}{where}: {problem}.", fix=fix) from None
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:  # PyYAML's, for some tags
        raise ConfigError("malformed", f"Invalid value in {path}: {error}.") from None
    finally:
        if loader is not None:
            loader.dispose()


def _indentation(text: str, line: int, column: int) -> str:
    """What is wrong if parsing failed at the first key of a line, and the line before has another indentation."""
    lines = text.splitlines()[: line + 1]
    if len(lines) <= line or not re.fullmatch(r" *[\w.-]*", lines[line][:column]):
        return ""
    before = [number for number, each in enumerate(lines[:line]) if each.partition("#")[0].strip()]
    indents = [len(lines[number]) - len(lines[number].lstrip()) for number in (*before[-1:], line)]
    same = len(set(indents)) == 1
    return "" if same else f"line {line + 1} is indented differently from line {before[-1] + 1}"


def _key_lines(node: yaml.Node, path: str = "") -> dict[str, int]:
    """The line of each dotted key, except for very long ones."""
    lines = dict[str, int]()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode) and len(path) + len(key.value) <= _MAX_SHOWN:
            lines[f"{path}{key.value}"] = key.start_mark.line + 1
            lines |= _key_lines(value, f"{path}{key.value}.")
    return lines


def _every_value(value: Any, place: str) -> Iterator[Any]:
    """A value and all values in it, or a YAML node and all nodes in it, with aliases expanded."""
    waiting, seen = [(value, 1)], 0
    while waiting:
        each, depth = waiting.pop()
        seen += 1
        if depth > _MAX_DEPTH or seen > _MAX_VALUES:
            raise _too_large(place)
        yield each
        inner = each.value if isinstance(each, yaml.CollectionNode) else each
        if isinstance(each, (dict, yaml.MappingNode)):
            inner = list(chain.from_iterable(each.items() if isinstance(each, dict) else each.value))
        waiting += [(part, depth + 1) for part in inner] if isinstance(inner, list) else []


def _require_plain(values: Any, place: str) -> None:
    """Sections, lists, text, numbers, true, false and null: what is stored with a checkpoint, as JSON."""
    for each in _every_value(values, place):
        what, fix = "", "put it in quotes to make it text"
        if isinstance(each, str) and each.encode(errors="replace").decode() != each:
            what, fix = f"{each[:40]!r}, which is not valid Unicode", "remove the surrogates"
        elif isinstance(each, int) and each.bit_length() > 64:
            what = f"a number of {each.bit_length()} bits"
        elif each is not None and not isinstance(each, (dict, list, str, int, float)):
            what = f"{each} ({type(each).__name__})"[:_MAX_SHOWN]
        if what:
            raise ConfigError("malformed", f"Unsupported value in {place[:_MAX_SHOWN]!r}: {what}.", fix=fix)


def _too_large(place: str) -> ConfigError:
    return ConfigError(
        "malformed",
        f"{place} has more than {_MAX_VALUES} values, or values nested more than {_MAX_DEPTH} levels deep.",
        why="aliases count as often as they are used; an anchor that contains its own alias has no end",
        fix="read long lists from a file in the code of the model or dataset",
    )


def _parse_toml(text: str, path: Path) -> tuple[Any, dict[str, int]]:
    section, lines = "", dict[str, int]()
    for number, line in enumerate(text.splitlines(), start=1):  # tomllib tells no lines
        if found := re.match(r"\s*\[([\w.-]+)\]", line):
            section = f"{found[1]}."
        elif found := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(section + found[1], number)
    try:
        return tomllib.loads(text), lines
    except RecursionError:
        raise _too_large(str(path)) from None
    except ValueError as error:  # a TOMLDecodeError, or a number with too many digits
        raise ConfigError("malformed", f"Invalid TOML in {path}: {error}.") from None


def merge(
    values: Mapping[str, Any],
    overrides: Sequence[str],
    origin: str,
    shorthands: Mapping[str, str],
    lines: Mapping[str, int],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with the overrides applied, and the origin of each dotted key. `shorthands` are sections that may be
    given as the value of one of their keys: `ema.warmup=false` completes `ema: 0.9`."""
    merged = _copy(values)
    leaves = flatten(merged, keep_empty=True)
    origins = {key: f"{origin}:{lines[key]}" if key in lines else origin for key in leaves}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key or not all(key.split(".")) or key.count(".") > _MAX_DEPTH:
            raise ConfigError(
                "bad-override",
                f"Invalid override {override[:80]!r}: expected key=value.",
                fix="write e.g. train.epochs=3",
            )
        _require_plain(key, "an override")
        value = parse_value(text, f"override {key}")
        first = key.split(".")[0]
        if first != key and first in shorthands and isinstance(merged.get(first), (int, float, str)):
            merged[first] = {shorthands[first]: merged[first]}
            origins[f"{first}.{shorthands[first]}"] = origins.pop(first)
        _set(merged, key.split("."), value, override)
        origins = {known: place for known, place in origins.items() if not f"{known}.".startswith(f"{key}.")}
        leaves = flatten({key: value}, keep_empty=True)
        origins.update(dict.fromkeys(leaves, f"override {override}"))
    return merged, origins


def inherited_options(
    values: Mapping[str, Any], merged: Mapping[str, Any], origins: Mapping[str, str]
) -> dict[str, list[str]]:
    """By section: options in the file of a component that an override has replaced by another one (`data.name=…`)."""
    found: dict[str, list[str]] = {}
    for key, before in values.items():
        now = merged.get(key)
        if not isinstance(before, Mapping) or not isinstance(now, Mapping) or before.get("name") == now.get("name"):
            continue
        overridden = (each.split(".") for each, place in origins.items() if place.startswith("override "))
        own = {parts[1] for parts in overridden if parts[0] == key and len(parts) > 1}
        if "name" in own:
            found[key] = [option for option in before if option in now and option not in own]
    return {key: options for key, options in found.items() if options}


def parse_value(text: str, place: str) -> Any:
    """The value of an override."""
    value, _ = _parse_yaml(text, Path(place))
    _require_plain(value, place)
    return value


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
