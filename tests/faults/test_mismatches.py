"""Programs in which one rank makes another collective than the others: see benchmarks/mismatches.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import mismatches
from faults.mismatches import KINDS

SEEDS = {kind: next(seed for seed in range(100) if mismatches.draw(seed).kind == kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mismatch_is_caught_in_debug_mode_with_both_lines_before_its_result_is_read(
    kind: str, tmp_path: Path
) -> None:
    result = mismatches.run(mismatches.draw(SEEDS[kind]), "debug", tmp_path, timeout=40.0)
    assert result.outcome == "caught", result
    assert result.names_both_lines(), result


def test_early_calls_of_paceline_are_checked_by_default(tmp_path: Path) -> None:
    programs = map(mismatches.draw, range(1000))
    early = next(each for each in programs if each.at < 9 and {call.api for call in each.calls} == {"dist"})
    result = mismatches.run(early, "default", tmp_path, timeout=40.0)
    assert result.outcome == "caught" and result.names_both_lines(), result
