"""The checkpoints of a run: names and sizes, without reading them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.run import regular_files
from paceline.run.folder import RunFolder

_MAX_POINTER = 1 << 16


@dataclass(frozen=True)
class SavedCheckpoint:
    name: str
    step: int | None  # None: the name does not tell
    size: int  # bytes
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


def _entries(path: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            yield from found
    except OSError:  # missing, or pruned by the run at this moment
        return


def _size(path: str) -> int:
    sizes = 0
    for entry in _entries(path):
        try:
            sizes += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return sizes


def _names_in(pointer: Path) -> list[str]:
    try:
        return regular_files.read_bytes(pointer, _MAX_POINTER).decode(errors="replace").split()
    except OSError:
        return []
