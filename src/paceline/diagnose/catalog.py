"""The page of each code: of paceline's errors in `catalog.md`, of failures in logs in `log_files/catalog.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from paceline.errors import PacelineError, did_you_mean


def pages() -> dict[str, str]:
    """The page of every code."""
    return own_pages() | log_pages()


def own_pages() -> dict[str, str]:
    return _read("catalog.md")


def log_pages() -> dict[str, str]:
    return _read("log_files/catalog.md")


@cache
def _read(name: str) -> dict[str, str]:
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    found = {}
    for part in text.split("\n## ")[1:]:
        code, _, body = part.partition("\n")
        found[code.strip()] = f"{code.strip()}\n\n{body.strip()}"
    return found


def sections(code: str) -> dict[str, str]:
    """The parts of a page, each as one line: "" for what happened, and "Why", "Check", "Fix", if it has them."""
    found: dict[str, str] = {}
    label = ""
    for paragraph in pages()[code].split("\n\n")[1:]:
        start = re.match(r"\*\*([\w ]+):\*\* ", paragraph)
        if start:
            label = start[1]
        text = " ".join(paragraph[start.end() if start else 0 :].split())
        found[label] = f"{found[label]} {text}" if label in found else text
    return found


def summaries(codes: Mapping[str, str]) -> str:
    """One line per code: the first sentence of its page."""
    width = max(map(len, codes))
    first = {code: " ".join(text.partition("\n\n")[2].split()) for code, text in codes.items()}
    return "\n".join(
        f"{code:<{width}}  {re.split(r'(?<=[.:]) ', text)[0].rstrip('.:')}" for code, text in first.items()
    )


def page(code: str) -> str:
    """The page of one code; for a family such as "launch", its codes."""
    known = pages()
    family = {name: text for name, text in known.items() if name.startswith(f"{code}.")}
    if family:
        return summaries(family)
    if code not in known:
        families = ", ".join(sorted({name.partition(".")[0] for name in known}))
        raise PacelineError(
            "unknown-code",
            f"Unknown error code {code!r}: {did_you_mean(code, known)}",
            fix=f"pass a family to list its codes: {families}",
        )
    return known[code]
