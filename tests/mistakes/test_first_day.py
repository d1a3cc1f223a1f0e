"""The output after a mistake names the cause and the line. `benchmarks/first_day_mistakes.py` runs all mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

import nodes
from mistakes.all_mistakes import ALL
from mistakes.mistake import Mistake, run_forked


@pytest.mark.parametrize("mistake", ALL[::10], ids=str)
def test_the_output_names_the_cause_and_the_line(tmp_path: Path, mistake: Mistake) -> None:
    with nodes.launchers(tmp_path) as launch:
        status, said = run_forked(mistake, tmp_path, launch)
    assert mistake.judge(status, said) == [], said
