"""The end of a rank's log, and the lines in it that contain a text."""

from __future__ import annotations

import os
from typing import Any

from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.watch.plain_text import clean_line

_TAIL_BYTES = 1 << 18
_SEARCHED_BYTES = 1 << 24
_MAX_LINE = 400  # characters


def log_lines(folder: RunFolder, rank: int, search: str = "", most: int = 500) -> dict[str, Any]:
    """The last lines, or the last ones that contain `search` in any case, each with its number, counted from the first
    one that was read. `skipped` bytes at the beginning of the file were not read."""
    path = folder.rank_log(rank)
    if folder.logs.is_symlink():
        return {"lines": [], "skipped": 0, "problem": "the folder of logs is a link"}
    try:
        with os.fdopen(regular_files.open_descriptor(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            skipped = file.seek(max(0, size - (_SEARCHED_BYTES if search else _TAIL_BYTES)))
            text = file.read(_SEARCHED_BYTES).decode(errors="replace")
    except OSError as error:
        return {"lines": [], "skipped": 0, "problem": f"{path.name}: {error.strerror}"}
    # A progress bar overwrites its line.
    lines = [line.rpartition("\r")[2] for line in text.rstrip("\n").split("\n")] if text else []
    wanted = search.lower()
    found = [(number, line) for number, line in enumerate(lines, 1) if wanted in line.lower()]
    kept = [(number, clean_line(line, _MAX_LINE)) for number, line in found[-most:]]
    return {"lines": kept, "found": len(found), "skipped": skipped, "problem": None}
