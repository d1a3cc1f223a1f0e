"""Hints for names from other frameworks, such as `gradient_accumulation_steps`; foreign_names.toml lists them."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from paceline.errors import did_you_mean

Kind = Literal["settings", "options", "methods", "names", "hooks", "values", "arguments", "dist"]
_hints = functools.cache(lambda: tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")))


def find_hint(kind: Kind, name: str) -> str:
    """What to use instead of a name of another framework; empty if the name is not known."""
    return next((hint for names, hint in _hints()[kind].items() if name in names.split()), "")


def unknown_name(kind: Kind, module: str, name: str) -> AttributeError:
    """For the `__getattr__` of a module."""
    hint = find_hint(kind, name)
    return AttributeError(f"module {module!r} has no attribute {name!r}" + (f"; use {hint}" if hint else ""))


def suggest(kind: Kind, name: str, known: Sequence[str]) -> str:
    """A hint if another framework uses that name and none of ours is almost the same; else the closest of ours."""
    is_typo = bool(get_close_matches(name, known, n=1, cutoff=0.85))
    return (not is_typo and find_hint(kind, name)) or did_you_mean(name, known)


def suggest_value(value: str, known: list[str]) -> str:
    """The known values that are meant by a value of another framework or with a typo; empty if there is none."""
    meant = find_hint("values", value.lower())
    near = [meant] if meant in known else sorted(get_close_matches(value.lower(), known, n=3, cutoff=0.65))
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
