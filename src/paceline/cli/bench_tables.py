"""Tables of figures in a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

_GAP = 2


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A table whose first row is its head, with right-aligned columns except the first one. A table that is wider than
    the terminal is broken into several, each of which begins with the first column."""
    room = width or _terminal_width()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    groups: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        taken = widths[0] + sum(widths[each] + _GAP for each in groups[-1])
        if groups[-1] and taken + widths[column] + _GAP > room:
            groups.append([])
        groups[-1].append(column)
    return "\n\n".join("\n".join(_line(row, group, widths) for row in rows) for group in groups)


def wrapped(text: str) -> str:
    """Text in lines that fit the terminal; further ones are indented."""
    return textwrap.fill(
        text, _terminal_width(), subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _terminal_width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _line(row: Sequence[str], group: Sequence[int], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in group)]
    return (" " * _GAP).join(cells).rstrip()
