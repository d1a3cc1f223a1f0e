"""Curves in a line of text."""

from __future__ import annotations

from math import inf, nan

from paceline.watch.sparkline import sparkline


def test_bars_go_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁" and sparkline([]) == ""


def test_many_values_are_averaged() -> None:
    assert sparkline([1.0] * 50 + [2.0] * 50, width=4) == "▁▁██"


def test_values_that_are_not_finite_are_marked() -> None:
    assert sparkline([1.0, nan, inf, 2.0]) == "▁××█" and sparkline([nan]) == "×"
    assert sparkline([-1.7e308, 1.7e308]) == "▁█" and sparkline([1.7e308] * 4, width=1) == "▁"
