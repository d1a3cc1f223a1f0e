"""The effective recipe of a run: each key with its value and where it came from."""

from __future__ import annotations

from paceline.config import files
from paceline.errors import ConfigError
from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.text import flatten
from paceline.watch.plain_text import clean


def recipe_rows(folder: RunFolder) -> list[tuple[str, str, str]]:
    """(dotted key, value, origin), in the order of the file. Empty if it is missing or invalid."""
    try:
        if folder.config.is_symlink():  # it may lead out of the run folder
            return []
        values, numbers = files.read(folder.config)
        lines = regular_files.read_text(folder.config).splitlines()
    except (ConfigError, OSError):
        return []
    rows = []
    for key, value in flatten(values, keep_empty=True).items():
        number = numbers.get(key, 0)
        line = lines[number - 1] if 0 < number <= len(lines) else ""
        origin = line.rpartition("  # ")[2] if "  # " in line else ""
        rows.append((clean(key, 80), value_text(value), clean(origin, 120)))
    return rows


def recipe_value(folder: RunFolder, key: str) -> object:
    """The value of a top-level key; None if it is missing."""
    try:
        return None if folder.config.is_symlink() else files.read(folder.config)[0].get(key)
    except (ConfigError, OSError):
        return None


def value_text(value: object, limit: int = 200) -> str:
    """As it is written in a recipe."""
    return clean("null" if value is None else str(value).lower() if isinstance(value, bool) else value, limit)
