"""Text from a run folder, which anybody may have written: made safe to print on a terminal."""

from __future__ import annotations

import math
import re
import unicodedata

_MAX_LENGTH = 200
# A CSI, OSC or string sequence of a terminal with its parameters; or the escape character and the one after it.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)?|\x1b."
)
# Control and format characters (also those that reverse the direction of text), surrogates, separators of lines.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def clean(value: object, limit: int = _MAX_LENGTH) -> str:
    """A value in one line: no terminal sequences and control characters, at most `limit` characters."""
    text = _ESCAPE.sub("", str(value)[: 8 * limit])
    text = re.sub(r"\s+", " ", text).strip()
    text = "".join(each for each in text if unicodedata.category(each) not in _UNSAFE)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean_line(line: str, limit: int = _MAX_LENGTH) -> str:
    """A line of a log, whose columns and indentation are kept: no terminal sequences and control characters."""
    text = _ESCAPE.sub("", line[: 8 * limit]).expandtabs(4)
    text = "".join(each for each in text if unicodedata.category(each) not in _UNSAFE).rstrip()
    return text if len(text) <= limit else text[: limit - 1] + "…"


def clean_lines(text: object, lines: int, limit: int = _MAX_LENGTH) -> list[str]:
    """The first lines of a text, as `clean_line` shows them, without empty ones."""
    found = [line for line in str(text)[: 8 * lines * limit].splitlines() if line.strip()]
    kept = [clean_line(line, limit) for line in found[:lines]]
    return [*kept, "…"] if len(found) > lines else kept


def number_text(value: object) -> str:
    """`1.4344`, `7.6e-06`, `nan`; `–` for anything that is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–"
    if math.isfinite(value) and value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.5g}"
