"""Pages of measurements: what they hold, and that they stand alone. tests/system/test_page_in_browser.py draws one."""

from __future__ import annotations

import math
import re

from paceline.tools.watch.sheet import ChartAxis, Series, line_chart, page, paragraph, table, time_bar
from watched import charts_in, embedded_values


def test_a_chart_has_its_series_and_axes() -> None:
    x, y = ChartAxis("size", log=4, unit="bytes"), ChartAxis("time", log=10, unit="seconds")
    made = page("Pages", [line_chart("Time", [Series("a", [(4.0, 1.0)], [(4.0, 1.5)], dashed=True)], x=x, y=y)])
    chart = charts_in(made)["Time"]
    assert chart["series"] == [{"name": "a", "points": [[4.0, 1.0]], "line": [[4.0, 1.5]], "dashed": True}]
    assert (chart["x"]["log"], chart["x"]["unit"], chart["y"]["label"]) == (4, "bytes", "time")


def test_values_that_are_not_finite_are_left_out() -> None:
    points = [(1.0, 2.0), (2.0, math.nan), (3.0, math.inf)]
    made = page("Pages", [line_chart("Loss", [Series("a", points, points)], x=ChartAxis("n"), y=ChartAxis("t"))])
    [series] = charts_in(made)["Loss"]["series"]
    assert series["points"] == series["line"] == [[1.0, 2.0]]


def test_other_parts_of_a_page() -> None:
    parts = [time_bar("Step", {"data": 1.0, "forward": 3.0}), table([["a", "b"], ["1", "2"]], "Sums"), paragraph("so")]
    bar, sums, text = embedded_values(page("Pages", parts))["sheet"]["parts"]
    assert bar["total"] == 4.0 and [part["label"] for part in bar["parts"]] == ["data", "forward"]
    assert (sums["title"], sums["head"], sums["rows"]) == ("Sums", ["a", "b"], [["1", "2"]])
    assert text["text"] == "so"


def test_a_page_loads_nothing_and_escapes_names() -> None:
    chart = line_chart("<b>", [Series("</script>", [(1, 1)])], x=ChartAxis("n"), y=ChartAxis("t"))
    made = page("<script>", [chart, table([["<i>"], ["&"]])])
    assert not re.search(r"<link|<img|src=|href=|url\(|@import|https?://", made.replace("http-equiv", ""))
    assert "<b>" not in made and "<i>" not in made and made.count("</script>") == 2
    assert embedded_values(made)["sheet"]["title"] == "<script>"
