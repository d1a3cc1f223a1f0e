"""The checkpoints of a run: names, sizes, and whether they are complete, without reading their tensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from paceline.run import regular_files
from paceline.run.folder import RunFolder

_MAX_POINTER = 1 << 16
_MAX_MANIFEST = 1 << 24
_MAX_CHECKED = 30
_MANIFEST, _DIGEST = "manifest.json", "manifest.xxh128"  # as in checkpoint/manifest.py, which imports torch


@dataclass(frozen=True)
class SavedCheckpoint:
    name: str
    step: int | None  # None: the name does not tell
    size: int  # bytes of its shards
    marks: list[str]  # latest, best


def saved_checkpoints(folder: RunFolder) -> list[SavedCheckpoint]:
    """Newest first. Saves in progress and links are left out."""
    if folder.checkpoints.is_symlink():
        return []
    pointers = {path.name: _names_in(path) for path in (folder.latest, folder.best)}
    found = []
    for entry in _entries(folder.checkpoints):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            numbered = re.match(r"step-(\d{1,15})(?!\d)", entry.name)
            marks = [pointer for pointer, names in pointers.items() if entry.name in names]
            found.append(SavedCheckpoint(entry.name, int(numbered[1]) if numbered else None, _size(entry.path), marks))
    return sorted(found, key=lambda each: (-1 if each.step is None else each.step, each.name), reverse=True)


def checked_checkpoints(folder: RunFolder) -> list[dict[str, Any]]:
    """As plain values, with the result of a check of the manifest's hash and of the sizes of files: `complete`, what is
    wrong, or empty if that was not checked. `paceline checkpoint verify` also checks the hashes of all tensors."""
    found = saved_checkpoints(folder)
    checks = [_checked(folder.checkpoints / each.name) for each in found[:_MAX_CHECKED]]
    checks += [""] * (len(found) - len(checks))
    return [{**asdict(each), "check": check} for each, check in zip(found, checks, strict=True)]


def _checked(path: Path) -> str:
    try:
        changed = (path / _MANIFEST).lstat().st_mtime_ns
    except OSError:
        return "no manifest"
    return _check(path, changed)


@lru_cache(maxsize=1000)
def _check(path: Path, changed: int) -> str:
    """A page asks every second; `changed` is when the manifest was written."""
    try:
        body = regular_files.read_bytes(path / _MANIFEST, _MAX_MANIFEST + 1)
        if len(body) > _MAX_MANIFEST:
            return ""
        if regular_files.read_bytes(path / _DIGEST, 100).split()[:1] != [xxhash.xxh3_128_hexdigest(body).encode()]:
            return "manifest corrupted"
        for name, file in json.loads(body)["files"].items():
            if Path(name).name != name or (path / name).lstat().st_size != file["bytes"]:
                return "incomplete"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "incomplete"
    return "complete"


def _entries(path: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            yield from found
    except OSError:  # missing, or pruned by the run at this moment
        return


def _size(path: str) -> int:
    sizes = 0
    for entry in _entries(path):
        with suppress(OSError):
            sizes += entry.stat(follow_symlinks=False).st_size if entry.name not in (_MANIFEST, _DIGEST) else 0
    return sizes


def _names_in(pointer: Path) -> list[str]:
    try:
        return regular_files.read_bytes(pointer, _MAX_POINTER).decode(errors="replace").split()
    except OSError:
        return []
