"""Text that a run folder contains is safe on a terminal."""

from __future__ import annotations

import math
import unicodedata

import pytest

from paceline.tools.watch.plain_text import clean, clean_lines, number_text
from watched import HOSTILE


def test_terminal_sequences_and_control_characters_are_removed() -> None:
    assert clean(HOSTILE) == "abcd e[bold]<script>alert(1)</script>"


@pytest.mark.parametrize("code", [*range(0x20), 0x7F, *range(0x80, 0xA0), 0x202E, 0x2066, 0x2028, 0xFEFF, 0xDC80])
def test_no_character_controls_the_terminal(code: int) -> None:
    shown = clean(f"a{chr(code)}b{chr(code)}")
    assert all(unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Zl") for each in shown)
    assert shown.startswith("a") and shown.encode()


def test_an_unfinished_sequence_is_removed() -> None:
    assert clean("a\x1b") == "a" and clean("a\x1b[") == "a" and clean("a\x1b]0;x") == "a"


def test_long_text_is_cut() -> None:
    assert clean("x" * 1000, 10) == "x" * 9 + "…"
    assert clean_lines("1\n\n  2\n3\n4", 2) == ["1", "  2", "…"]
    assert clean_lines("    at = here\n         ^^^^", 2) == ["    at = here", "         ^^^^"]


def test_lines_keep_their_columns() -> None:
    frame = "              loss = f(x)  # twice\n                     ^^^^"
    assert clean_lines(frame, 2) == frame.splitlines()


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.43436, "1.4344"), (7.6e-6, "7.6e-06"), (0, "0"), (math.nan, "nan"), (1e30, "1e+30"), (None, "–"), (True, "–")],
)
def test_numbers(value: object, text: str) -> None:
    assert number_text(value) == text
