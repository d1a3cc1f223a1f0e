"""Formats numbers, lists, names of ranks, tables and curves, and parses `key=value,…`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

_BARS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"


def format_bytes(size: float) -> str:
    """`1.5 GiB`, `20.0 MiB`, `1.6 KiB`, `12 B`"""
    for unit, factor, least in (("GiB", 2**30, 2**30), ("MiB", 2**20, 2**17), ("KiB", 2**10, 2**7)):
        if size >= least:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def format_sent(size: float) -> str:
    """`1.28 MB`, `75.1 kB`, `48 B`: decimal units, as for networks"""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.3g} B"


def format_count(number: int) -> str:
    """`7.0 billion`, `1.5 million`, `640128`"""
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return str(number)


def format_rate(value: float) -> str:
    """`12.3k`, `123`, `4.5`, `0.032`"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def format_value(value: float) -> str:
    """`0.4321`, `3.2e-05`: of a loss or metric"""
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """`4.2 s`, `12 ms`, `3 min 20 s`, `2 h 5 min`"""
    if 0 < seconds < 0.05:
        return f"{seconds * 1e3:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_age(seconds: float) -> str:
    """In the largest unit that fits: `3 d`, `7 h`, `12 min`, `4 s`"""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def format_clock(seconds: int) -> str:
    """`1:02:03`, `2:03`"""
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


def shorten(text: str, most: int) -> str:
    """The beginning of a text that has more than so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def plural(number: int, thing: str) -> str:
    """`1 rank`, `2 ranks`"""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def numbered(thing: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 4`"""
    return f"{thing}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """`a, b and 2 others`: the first ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} others" if len(names) > most else "")


def by_rank(values: Sequence[str], indent: str = "    ", ranks: Sequence[int] | None = None) -> str:
    """One line per distinct value, with the ranks that have it. `ranks`: those of the values, if not all."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        found.setdefault(value, []).append(rank)
    return "\n".join(f"{indent}{numbered('rank', who)}: {value}" for value, who in found.items())


def columns(rows: Iterable[Iterable[str]]) -> str:
    """A table with left-aligned cells."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)


def sparkline(values: Sequence[float], width: int = 40, scale: Sequence[float] = ()) -> str:
    """A curve in a line. Each bar is the mean of consecutive values, on a scale from the lowest to the highest value of
    `scale`, or else of the bars. `×` stands for values of which none is finite."""
    count = min(width, len(values))
    means = [_mean(values[len(values) * n // count : len(values) * (n + 1) // count]) for n in range(count)]
    finite = [value for value in scale or means if value is not None and math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_NOT_FINITE if mean is None else _BARS[_height(mean, low, high)] for mean in means)


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    # Divided first: the sum of large values may be infinite.
    return sum(value / len(finite) for value in finite) if finite else None


def _height(value: float, low: float, high: float) -> int:
    span = high / 2 - low / 2  # halved: infinite for large values otherwise; tiny for means of equal values
    return round((len(_BARS) - 1) * ((value / 2 - low / 2) / span)) if span > 1e-12 * max(abs(low), abs(high)) else 0


def parse_pairs(text: str) -> list[tuple[str, str | None]]:
    """`a=1,b,c=` as [("a", "1"), ("b", None), ("c", "")], in the order given."""
    found: list[tuple[str, str | None]] = []
    for item in text.split(","):
        key, equals, value = item.partition("=")
        found.append((key, value if equals else None))
    return found


def flatten(values: Mapping[str, Any], prefix: str = "", *, keep_empty: bool = False) -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}. Empty mappings are omitted unless `keep_empty`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and (value or not keep_empty):
            flat |= flatten(value, f"{prefix}{key}.", keep_empty=keep_empty)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


_MAX_NAMED = 8
_ONE_NODE: Mapping[int, int] = MappingProxyType({})


def rank_names(ranks: Iterable[int], nodes: Mapping[int, int] = _ONE_NODE) -> str:
    """`nodes`: the node of each rank, if there are several."""
    found = sorted(ranks)
    numbers = [f"{rank} (node {nodes[rank]})" if rank in nodes else str(rank) for rank in found[:_MAX_NAMED]]
    if len(found) == 1:
        return f"rank {numbers[0]}"
    last = f"{len(found) - _MAX_NAMED} others" if len(found) > _MAX_NAMED else numbers.pop()
    return f"ranks {', '.join(numbers)} and {last}"
