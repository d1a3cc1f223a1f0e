"""Charts and pages: what is drawn where, and that a page stands alone."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from paceline.watch.charts import ChartAxis, Series, line_chart, page, stacked_bars, table

POWERS = [(4.0**power, 10.0**power) for power in range(6)]


def drawn(svg: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(kind))


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in drawn(svg, "text")]


def test_powers_are_on_a_straight_line_between_logarithmic_axes() -> None:
    svg = line_chart("Time", [Series("a", POWERS)], x=ChartAxis("bytes", log=4), y=ChartAxis("seconds", log=10))
    places = [(float(dot.get("cx", 0)), float(dot.get("cy", 0))) for dot in drawn(svg, "circle")]
    across = [right[0] - left[0] for left, right in pairwise(places)]
    up = [left[1] - right[1] for left, right in pairwise(places)]
    assert across == pytest.approx([across[0]] * 5, abs=0.2) and across[0] > 50
    assert up == pytest.approx([up[0]] * 5, abs=0.2) and up[0] > 50


def test_axes_are_labeled() -> None:
    svg = line_chart(
        "Time", [Series("a", POWERS)], x=ChartAxis("bytes", log=4, show="{:.0f} B".format), y=ChartAxis("µs", log=10)
    )
    assert {"Time", "bytes", "µs", "a", "1 B", "1024 B", "1", "100000"} <= set(texts(svg))


def test_a_linear_axis_starts_at_zero() -> None:
    svg = line_chart(
        "Speed", [Series("a", [(1, 1), (2, 1.9), (4, 3.7)])], x=ChartAxis("ranks"), y=ChartAxis("speed-up")
    )
    assert {"0", "4"} <= set(texts(svg))


def test_a_model_is_dashed_and_in_the_color_of_its_measurement() -> None:
    series = [Series("a", POWERS, POWERS, dashed=True), Series("b", [(1, 5)])]
    svg = line_chart("Time", series, x=ChartAxis("bytes", log=4), y=ChartAxis("seconds", log=10))
    [line] = drawn(svg, "polyline")
    first, *_, last = drawn(svg, "circle")
    assert line.get("stroke-dasharray") and "s0" in line.get("class", "") and first.get("class") == "s0"
    assert last.get("class") == "s1"


def test_parts_of_a_bar_lie_on_top_of_each_other() -> None:
    svg = stacked_bars("Step", [("gpt", [1.0, 3.0])], ["data", "forward"], y=ChartAxis("ms"))
    data, forward = (each for each in drawn(svg, "rect") if "bar" in each.get("class", ""))
    assert float(forward.get("height", 0)) == pytest.approx(3 * float(data.get("height", 0)), rel=0.01)
    bottom = float(forward.get("y", 0)) + float(forward.get("height", 0))
    assert bottom == pytest.approx(float(data.get("y", 0)), abs=0.2)
    assert {"gpt", "data", "forward", "ms"} <= set(texts(svg))


def test_a_page_loads_nothing_and_escapes_names() -> None:
    chart = line_chart("<b>", [Series("x&y", [(1, 1)])], x=ChartAxis("n"), y=ChartAxis("t"))
    made = page("<script>", [chart, table([["<i>"], ["&"]])])
    assert not re.search(r"<script|<link|<img|src=|href=|url\(|@import|https?://", made)
    assert "<b>" not in made and "<i>" not in made and "x&amp;y" in made
    assert "prefers-color-scheme: dark" in made
