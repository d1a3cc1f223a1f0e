"""Tables in a terminal."""

from __future__ import annotations

from paceline.tools.cli.bench import aligned

ROWS = [["ranks", "step", "rate"], ["1", "40.00", "800"], ["16", "3.00", "10667"]]


def test_columns_are_aligned() -> None:
    assert aligned(ROWS, width=40) == "ranks   step   rate\n1      40.00    800\n16      3.00  10667"


def test_a_table_wider_than_the_terminal_is_broken_into_several() -> None:
    first, second = aligned(ROWS, width=15).split("\n\n")
    assert first.splitlines()[1] == "1      40.00" and second.splitlines()[1] == "1        800"
    assert len(aligned(ROWS, width=1).split("\n\n")) == 2
