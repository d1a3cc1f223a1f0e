"""What `paceline explain LOGFILE` prints."""

from __future__ import annotations

import textwrap

from paceline.diagnose import catalog
from paceline.diagnose.log_files.log_lines import LogLine
from paceline.diagnose.log_files.verdict import MAX_QUOTED, LogVerdict
from paceline.diagnose.rank_names import rank_names

_WIDTH = 110


def describe(verdict: LogVerdict) -> str:
    if verdict.line is None:
        return "No failure found."
    lines = [_headline(verdict), textwrap.indent(_quote(verdict.line), "  | ")]
    if verdict.place:
        lines.append(f"  at: {verdict.place}")
    if verdict.code == "unknown":
        lines.append(
            "  This failure is not in the catalog. It is the first in the log; later ones are usually its consequences."
        )
    else:
        parts = catalog.sections(verdict.code)
        lines += [
            textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
            for name, text in (("what", parts[""]), *((each.lower(), parts.get(each, "")) for each in _LABELS))
            if text
        ]
    if verdict.then:
        lines.append("  then: " + "; ".join(_consequence(each.code, each.rank, each.line) for each in verdict.then))
    if verdict.code != "unknown":
        lines.append(f"\nThe whole page: paceline explain {verdict.code}")
    return "\n".join(lines)


_LABELS = ("Why", "Check", "Fix")


def _headline(verdict: LogVerdict) -> str:
    assert verdict.line is not None
    where = f"{verdict.line.file}:{verdict.line.number}"
    who = "" if verdict.rank is None else f"rank {verdict.rank}"
    if verdict.node:
        who += f"{' on' if who else 'on'} node {verdict.node}"
    others = [rank for rank in verdict.ranks if rank != verdict.rank]
    also = f" (also {rank_names(others)})" if others and who else ""
    return f"[{verdict.code}] {who}{also}{', ' if who else ''}{where}"


def _quote(line: LogLine) -> str:
    text = line.text.strip()
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 1]}…"


def _consequence(code: str, rank: int | None, line: LogLine) -> str:
    return f"{code}{'' if rank is None else f' on rank {rank}'} (line {line.number})"
