"""Charts and pages of measurements: inline SVG in one HTML file, which needs no network and no scripts.

    size, seconds = ChartAxis("message", log=4, show=format_size), ChartAxis("seconds", log=10)
    time = line_chart("Time", [Series("all_reduce", measured, line=fitted)], x=size, y=seconds)
    Path("comm.html").write_text(page("Collectives on 2 ranks", [time, table(rows)]))

Colors follow the light or dark mode of the browser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log, log10

Point = tuple[float, float]

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 170, 34, 48  # margins; the legend is on the right
_COLORS = 6
_MAX_TICKS = 8

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --faint: #d9dde3; --paper: #ffffff;
  --c0: #0b62a4; --c1: #c2410c; --c2: #15803d; --c3: #7e22ce; --c4: #a16207; --c5: #be185d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --faint: #39414d; --paper: #14181f;
  --c0: #6cb6f5; --c1: #fb923c; --c2: #4ade80; --c3: #c084fc; --c4: #facc15; --c5: #f472b6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 60em; padding: 0 1em; }
svg { width: 100%; max-width: 720px; height: auto; display: block; margin: 1em 0; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .title { font-size: 14px; font-weight: 600; }
svg .grid { stroke: var(--faint); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2; }
svg .bar { stroke: var(--paper); stroke-width: 1; }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15em 0.9em; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child { text-align: left; }
""" + "\n".join(f".s{n} {{ color: var(--c{n}); }}" for n in range(_COLORS))


@dataclass(frozen=True)
class ChartAxis:
    """`log`: the base of a logarithmic scale, whose powers are labeled; None: linear. `show` formats a label."""

    label: str
    log: float | None = None
    from_zero: bool = True  # if linear
    show: Callable[[float], str] = "{:g}".format

    def bounds(self, values: Sequence[float]) -> tuple[float, float]:
        """The range of the axis: whole powers, or whole ticks."""
        low, high = min(values), max(values)
        if self.log is None:
            low = 0.0 if self.from_zero else low
            step = _step(high - low or abs(high) or 1.0)
            first = floor(low / step + 1e-9)
            return step * first, step * max(first + 1, ceil(high / step - 1e-9))
        least, most = floor(log(low, self.log) + 1e-9), ceil(log(high, self.log) - 1e-9)
        return self.log**least, self.log ** max(most, least + 1)

    def ticks(self, low: float, high: float) -> list[float]:
        if self.log is None:
            step = _step(high - low)
            return [low + step * number for number in range(round((high - low) / step) + 1)]
        least, most = round(log(low, self.log)), round(log(high, self.log))
        every = ceil((most - least + 1) / _MAX_TICKS)
        return [self.log**power for power in range(least, most + 1, every)]

    def place(self, value: float, low: float, high: float) -> float:
        """Between 0 and 1."""
        if self.log is None:
            return (value - low) / (high - low)
        return log(value / low) / log(high / low)


@dataclass(frozen=True)
class Series:
    """`points` are drawn as dots; `line` as a line, dashed if it is a model rather than a measurement."""

    name: str
    points: Sequence[Point] = ()
    line: Sequence[Point] = ()
    dashed: bool = False


def line_chart(title: str, series: Sequence[Series], *, x: ChartAxis, y: ChartAxis) -> str:
    """Series over a common x axis, each in a color of its own."""
    every = [point for each in series for point in (*each.points, *each.line)]
    frame = _Frame(x, y, x.bounds([point[0] for point in every]), y.bounds([point[1] for point in every]))
    drawn = [frame.grid(frame.x_ticks())]
    for number, each in enumerate(series):
        places = [frame.place(point) for point in each.line]
        if places:
            dash = ' stroke-dasharray="6 4"' if each.dashed else ""
            path = " ".join(f"{left:.1f},{top:.1f}" for left, top in places)
            drawn.append(f'<polyline class="line {_color(number)}" stroke="currentColor"{dash} points="{path}"/>')
        for point in each.points:
            left, top = frame.place(point)
            label = escape(f"{each.name}: {x.show(point[0])}, {y.show(point[1])}")
            dot = f'<circle class="{_color(number)}" fill="currentColor" cx="{left:.1f}" cy="{top:.1f}" r="3.5">'
            drawn.append(f"{dot}<title>{label}</title></circle>")
    return _svg(title, [*drawn, *_legend([each.name for each in series])])


def stacked_bars(title: str, bars: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], *, y: ChartAxis) -> str:
    """A bar for each name, of the values of `parts` on top of each other."""
    x = ChartAxis("")
    frame = _Frame(x, y, (0.0, float(len(bars))), y.bounds([sum(values) for _, values in bars]))
    drawn = [frame.grid([(number + 0.5, name) for number, (name, _) in enumerate(bars)], vertical=False)]
    for place, (name, values) in enumerate(bars):
        below = 0.0
        for number, value in enumerate(values):
            left, top = frame.place((place + 0.2, below + value))
            right, bottom = frame.place((place + 0.8, below))
            label = escape(f"{name}, {parts[number]}: {y.show(value)}")
            box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
            drawn.append(f'<rect class="bar {_color(number)}" fill="currentColor" {box}><title>{label}</title></rect>')
            below += value
    return _svg(title, [*drawn, *_legend(parts)])


def table(rows: Iterable[Sequence[str]]) -> str:
    """An HTML table; the first row is its head."""
    head, *rest = rows
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rest)
    return f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>{body}</table>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def page(title: str, parts: Iterable[str]) -> str:
    """A stand-alone HTML page of charts, tables and paragraphs."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>{body}</body></html>\n'


@dataclass(frozen=True)
class _Frame:
    """The area between the axes."""

    x: ChartAxis
    y: ChartAxis
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def place(self, point: Point) -> Point:
        """In the coordinates of the SVG."""
        across, up = self.x.place(point[0], *self.x_range), self.y.place(point[1], *self.y_range)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    def x_ticks(self) -> list[tuple[float, str]]:
        return [(tick, self.x.show(tick)) for tick in self.x.ticks(*self.x_range)]

    def grid(self, x_ticks: Sequence[tuple[float, str]], *, vertical: bool = True) -> str:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        drawn = []
        for tick in self.y.ticks(*self.y_range):
            _, top = self.place((self.x_range[0], tick))
            drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{top:.1f}" y2="{top:.1f}"/>')
            drawn.append(_text(_LEFT - 8, top + 4, self.y.show(tick), anchor="end"))
        for tick, label in x_ticks:
            left, _ = self.place((tick, self.y_range[0]))
            if vertical:
                drawn.append(f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP}" y2="{bottom}"/>')
            drawn.append(_text(left, bottom + 18, label))
        drawn.append(_text((_LEFT + right) / 2, _HEIGHT - 8, self.x.label))
        drawn.append(_text(_LEFT - 72, _TOP - 14, self.y.label, anchor="start"))
        return "".join(drawn)


def _svg(title: str, drawn: Sequence[str]) -> str:
    head = _text((_LEFT + _WIDTH - _RIGHT) / 2, 20, title, kind="title")
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{head}{"".join(drawn)}</svg>'


def _legend(names: Sequence[str]) -> list[str]:
    left, drawn = _WIDTH - _RIGHT + 16, []
    for number, name in enumerate(names):
        top = _TOP + 8 + 20 * number
        box = f'<rect class="{_color(number)}" fill="currentColor" x="{left}" y="{top}" width="12" height="12"/>'
        drawn += [box, _text(left + 18, top + 11, name, anchor="start")]
    return drawn


def _text(left: float, top: float, text: str, *, anchor: str = "middle", kind: str = "label") -> str:
    return f'<text class="{kind}" x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _color(number: int) -> str:
    return f"s{number % _COLORS}"


def _step(span: float) -> float:
    """The distance of linear ticks: 1, 2 or 5 times a power of ten, for four to eight of them."""
    power: float = 10.0 ** floor(log10(span / 4))
    return next(power * each for each in (1, 2, 5, 10) if span / (power * each) <= _MAX_TICKS)
