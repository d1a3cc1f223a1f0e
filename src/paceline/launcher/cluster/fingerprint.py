"""What has to be the same on all nodes of a job: the code, the recipe, the versions; and where two of them differ.

Two nodes that run different code train two different models, or wait for each other for ever. So each launcher says
what it would run, and a node that differs from the first is refused before any rank starts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.text import flatten

Identity = dict[str, dict[str, str]]  # of each aspect: what, and which

_MANY = 2000  # files of code that are looked at
_LONGEST = 60


def identity(*, script: Path | None, recipe: Mapping[str, Any] | None) -> Identity:
    versions = {"paceline": _version("paceline"), "python": platform.python_version(), "torch": _version("torch")}
    return {
        "version": versions,
        "code": {} if script is None else _code(script),
        "recipe": {} if recipe is None else _recipe(recipe),
    }


def _recipe(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Without what says where this node is among the others."""
    flat = flatten({key: value for key, value in recipe.items() if key != "launch"})
    return {key: json.dumps(value) for key, value in flat.items()}


def differences(first: Identity, other: Identity) -> list[str]:
    """In words, `first` being on the left."""
    found = []
    for aspect in sorted({*first, *other}):
        ours, theirs = first.get(aspect, {}), other.get(aspect, {})
        for name in sorted({*ours, *theirs}):
            left, right = ours.get(name), theirs.get(name)
            if left != right:
                found.append(_words(aspect, name, left, right))
    return found


def _words(aspect: str, name: str, left: str | None, right: str | None) -> str:
    if aspect == "code":
        state = "is missing here" if right is None else "is not on the first node" if left is None else "has other text"
        return f"code: {name} {state}"
    return f"{aspect}: {name} is {_short(left)} and {_short(right)}"


def _short(text: str | None) -> str:
    if text is None:
        return "not set"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _code(script: Path) -> dict[str, str]:
    """The script and the Python files in its folder and below: what it may import from there."""
    if not script.is_file():
        return {}
    files = {script.name: _hash(script)}
    root = script.resolve().parent
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        # Environments and data are not the user's code; a folder called site-packages is somebody else's.
        folders[:] = sorted(
            name for name in folders
            if not name.startswith(".") and name not in ("site-packages", "__pycache__", "runs", "node_modules")
            and not (here / name / "pyvenv.cfg").exists()
        )  # fmt: skip
        for name in sorted(names):
            if name.endswith(".py") and len(files) < _MANY:
                files[str((here / name).relative_to(root))] = _hash(here / name)
    return files


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return "unreadable"
