from __future__ import annotations

from math import inf, nan

import pytest

from paceline import text
from paceline.text import rank_names

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (12, "12 B"), (1640, "1.6 KiB"), (20 * 2**20, "20.0 MiB"), (GIB, "1.0 GiB"), (1.54 * GIB, "1.5 GiB")],
)
def test_bytes(size: float, expected: str) -> None:
    assert text.format_bytes(size) == expected


@pytest.mark.parametrize(
    ("number", "expected"), [(640128, "640128"), (1_500_000, "1.5 million"), (7_000_000_000, "7.0 billion")]
)
def test_counts(number: int, expected: str) -> None:
    assert text.format_count(number) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.032, "0.032"), (4.52, "4.5"), (123.4, "123"), (12345, "12.3k"), (1.25e6, "1.2M"), (3e9, "3.0G")],
)
def test_rates(value: float, expected: str) -> None:
    assert text.format_rate(value) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0.0 s"), (0.0123, "12 ms"), (4.24, "4.2 s"), (59.96, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert text.format_duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(-3, "0 s"), (59, "59 s"), (60, "1 min"), (7199, "1 h"), (86400 * 3 + 5, "3 d")]
)
def test_ages(seconds: float, expected: str) -> None:
    assert text.format_age(seconds) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(0, "0:00"), (63, "1:03"), (3723, "1:02:03"), (360000, "100:00:00")])
def test_clocks(seconds: int, expected: str) -> None:
    assert text.format_clock(seconds) == expected


def test_plurals() -> None:
    assert [text.plural(number, "data rank") for number in (0, 1, 2)] == ["0 data ranks", "1 data rank", "2 data ranks"]
    assert text.numbered("rank", [3]) == "rank 3"
    assert text.numbered("rank", [3, 4]) == "ranks 3, 4"


def test_columns_are_aligned_and_no_line_ends_in_spaces() -> None:
    rows = [("name", "step", "note"), ("a", "100", ""), ("longer", "1", "here")]
    assert text.columns(rows).split("\n") == ["name    step  note", "a       100", "longer  1     here"]
    assert text.columns([]) == ""


def test_pairs_keep_their_order_and_tell_an_empty_value_from_none() -> None:
    assert text.parse_pairs("b=1,a,c=,b=x=y") == [("b", "1"), ("a", None), ("c", ""), ("b", "x=y")]
    assert text.parse_pairs("") == [("", None)]


def test_flatten() -> None:
    nested = {"a": {"b": 1, "c": {"d": [2]}}, "e": None, "f": {}}
    assert text.flatten(nested) == {"a.b": 1, "a.c.d": [2], "e": None}
    assert text.flatten(nested, keep_empty=True) == {"a.b": 1, "a.c.d": [2], "e": None, "f": {}}


def test_bytes_on_a_network_have_decimal_units() -> None:
    shown = [text.format_sent(size) for size in (48.2, 999.6, 75_080, 1_280_000, 3.4e9)]
    assert shown == ["48.2 B", "1 kB", "75.1 kB", "1.28 MB", "3.4 GB"]


def test_bars_go_from_the_lowest_to_the_highest_value() -> None:
    assert text.sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert text.sparkline([3.0, 3.0]) == "▁▁" and text.sparkline([]) == ""


def test_many_values_are_averaged() -> None:
    assert text.sparkline([1.0] * 50 + [2.0] * 50, width=4) == "▁▁██"


def test_a_constant_is_flat_whatever_the_mean_of_its_values_rounds_to() -> None:
    assert text.sparkline([0.01] * 364) == "▁" * 40


def test_curves_may_share_a_scale() -> None:
    assert text.sparkline([8.0, 4.0, 1.0], scale=[1.0, 8.0]) == "█▄▁"
    assert text.sparkline([4.0, inf], scale=[1.0, 8.0, nan]) == "▄×"


def test_values_that_are_not_finite_are_marked() -> None:
    assert text.sparkline([1.0, nan, inf, 2.0]) == "▁××█" and text.sparkline([nan]) == "×"
    assert text.sparkline([-1.7e308, 1.7e308]) == "▁█" and text.sparkline([1.7e308] * 4, width=1) == "▁"


def test_ranks_are_named_in_order_and_at_most_eight_of_them() -> None:
    assert rank_names([2]) == "rank 2"
    assert rank_names([3, 0, 1]) == "ranks 0, 1 and 3"
    assert rank_names(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 others"


def test_nodes_are_named_if_there_are_several() -> None:
    assert rank_names([0, 4], {0: 0, 4: 1}) == "ranks 0 (node 0) and 4 (node 1)"
