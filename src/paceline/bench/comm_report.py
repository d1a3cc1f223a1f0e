"""The report of `paceline bench comm`: plain values for JSON, tables for a terminal, and a page with charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isinf
from typing import Any

from paceline.bench.collective_times import CollectiveTimes
from paceline.bench.comm_request import format_size
from paceline.plan.network_model import LinkModel
from paceline.text import columns, format_rate, plural
from paceline.watch.charts import ChartAxis, Series, line_chart, page, paragraph
from paceline.watch.charts import table as html_table

VERSION = 1
_COMPUTE = "predicted from the fits and a step that computes for {:.1f} ms; without the time that compression takes"
_HEAD = ("size", "time", "algorithm bandwidth", "bus bandwidth")


def entry(times: CollectiveTimes) -> dict[str, Any]:
    """A collective as plain values: seconds, bytes and bytes per second."""
    points = [
        {
            "bytes": each.size,
            "seconds": each.seconds,
            "algorithm_bandwidth": each.algorithm_bandwidth,
            "bus_bandwidth": each.bus_bandwidth,
        }
        for each in times.timings
    ]
    link = None
    if len(points) > 1:
        ranks = times.timings[0].ranks
        link = LinkModel.fit(times.collective, ranks, [(each.size, each.seconds) for each in times.timings])
    if link is None or isinf(link.bandwidth):
        no_fit = "no fit: the sizes show no bandwidth; add larger ones (--sizes), or repeat on an idle machine"
        note = "; ".join(filter(None, [times.note, no_fit]))
        return {"points": points, "model": None, "note": note}
    return {"points": points, "model": asdict(link), "note": times.note}


def link_of(entry: Mapping[str, Any]) -> LinkModel | None:
    return None if entry["model"] is None else LinkModel(**entry["model"])


def describe(collective: str, entry: Mapping[str, Any]) -> str:
    """The table of a collective, with its fit and its note."""
    table = _table([_HEAD, *(_row(point) for point in entry["points"])])
    return "\n".join(filter(None, [collective, table, describe_fit(entry), entry["note"]]))


def describe_fit(entry: Mapping[str, Any]) -> str:
    """`fitted: 45 µs per round + bytes / 24.1MB/s, within 8 %`"""
    link = link_of(entry)
    if link is None:
        return ""
    latency, bandwidth = _microseconds(link.latency), f"{format_rate(link.bandwidth)}B/s"
    return f"fitted: {latency} per round, {bandwidth}; within {100 * link.worst_error:.0f} % of every size"


def describe_advice(advice: Mapping[str, Any]) -> str:
    """A sentence, and what each method would cost."""
    if not advice["methods"]:
        return str(advice["sentence"])
    return f"{_table(_methods(advice))}\n{_COMPUTE.format(advice['compute'] * 1e3)}\n\n{advice['sentence']}"


def _methods(advice: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        (each["name"], format_size(each["sent"]), f"{each['seconds'] * 1e3:,.1f} ms", f"{100 * each['waits']:.0f} %")
        for each in advice["methods"]
    ]
    return [("method", "sent per step", "waits", "of the step"), *rows]


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows])


def _row(point: Mapping[str, float]) -> tuple[str, ...]:
    rates = (f"{format_rate(point[name])}B/s" for name in ("algorithm_bandwidth", "bus_bandwidth"))
    return (format_size(point["bytes"]), _microseconds(point["seconds"]), *rates)


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds >= 10e-6 else f"{seconds * 1e6:.1f} µs"


def html(report: Mapping[str, Any]) -> str:
    """A page with charts of time and bus bandwidth, and all tables."""
    found: Mapping[str, Mapping[str, Any]] = {
        name: each for name, each in report["collectives"].items() if each["points"]
    }
    size = ChartAxis("message size", log=4, show=format_size)
    time = line_chart(
        "Time (dots: measured; dashed: fitted latency + bandwidth)",
        [
            Series(name, _points(each, "seconds"), _fitted(name, each, report["ranks"]), dashed=True)
            for name, each in found.items()
        ],
        x=size,
        y=ChartAxis("time", log=10, show=_time),
    )
    bandwidth = line_chart(
        "Bus bandwidth",
        [Series(name, _points(each, "bus_bandwidth"), _points(each, "bus_bandwidth")) for name, each in found.items()],
        x=size,
        y=ChartAxis("bandwidth", log=10, show=lambda value: f"{format_rate(value)}B/s"),
    )
    parts = [paragraph(report["setting"]), time, bandwidth]
    if (advice := report["advice"]) is not None:
        parts.append(f"<h2>sync</h2>{paragraph(advice['sentence'])}")
        if advice["methods"]:
            parts += [html_table(_methods(advice)), paragraph(_COMPUTE.format(advice["compute"] * 1e3))]
    for name, each in found.items():
        notes = " ".join(filter(None, [describe_fit(each), each["note"]]))
        parts += [f"<h2>{name}</h2>", html_table([_HEAD, *(_row(point) for point in each["points"])]), paragraph(notes)]
    return page(f"Collectives on {plural(report['ranks'], 'rank')}", parts)


def _points(entry: Mapping[str, Any], value: str) -> list[tuple[float, float]]:
    return [(point["bytes"], point[value]) for point in entry["points"]]


def _fitted(collective: str, entry: Mapping[str, Any], ranks: int) -> list[tuple[float, float]]:
    """The model over the measured range, between sizes as well: its knee is between two of them."""
    link, sizes = link_of(entry), [point["bytes"] for point in entry["points"]]
    if link is None:
        return []
    steps = 40
    grid: Sequence[float] = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / steps) for step in range(steps + 1)]
    return [(size, link.time(collective, size, ranks)) for size in grid]


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale * (1 - 1e-9):
            return f"{seconds / scale:g} {unit}"
    return f"{seconds * 1e6:g} µs"
