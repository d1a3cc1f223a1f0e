"""Pages of measurements, such as those of `paceline bench`: in the design of the page of a run (page/sheet.js).

size, seconds = ChartAxis("message size", log=4, unit="bytes"), ChartAxis("time", log=10, unit="seconds")
time = line_chart("Time", [Series("all_reduce", measured, line=fitted)], x=size, y=seconds)
Path("comm.html").write_text(page("Collectives on 2 ranks", [time, table(rows)]))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

from paceline.tools.watch.report import standalone_page

Point = tuple[float, float]
Part = dict[str, Any]


@dataclass(frozen=True)
class ChartAxis:
    """`log`: the base of a logarithmic scale, whose powers are labeled; None: linear."""

    label: str
    log: int | None = None
    from_zero: bool = True  # if linear
    unit: Literal["number", "bytes", "rate", "seconds"] = "number"


@dataclass(frozen=True)
class Series:
    """`points` are drawn as dots; `line` as a line, dashed if it is a model rather than a measurement."""

    name: str
    points: Sequence[Point] = ()
    line: Sequence[Point] = ()
    dashed: bool = False


def line_chart(title: str, series: Sequence[Series], *, x: ChartAxis, y: ChartAxis) -> Part:
    """Series over a common x axis, each in a color of its own."""
    shown = [{**asdict(each), "points": _finite(each.points), "line": _finite(each.line)} for each in series]
    return {"kind": "chart", "title": title, "series": shown, "x": asdict(x), "y": asdict(y)}


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if all(map(isfinite, point))]


def time_bar(title: str, seconds: Mapping[str, float]) -> Part:
    """A bar of parts beside each other, in proportion to their seconds."""
    parts = [{"name": name, "label": name, "seconds": each} for name, each in seconds.items()]
    return {"kind": "time", "title": title, "parts": parts, "total": sum(seconds.values())}


def table(rows: Iterable[Sequence[str]], title: str = "") -> Part:
    """The first row is its head."""
    head, *rest = rows
    return {"kind": "table", "title": title, "head": head, "rows": rest}


def paragraph(text: str) -> Part:
    return {"kind": "text", "text": text}


def page(title: str, parts: Iterable[Part]) -> str:
    """A page that needs no network."""
    return standalone_page({"sheet": {"title": title, "parts": list(parts)}}).decode()
