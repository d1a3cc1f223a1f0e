"""Times of steps as a table."""

from __future__ import annotations

import pytest

from paceline.tools.bench.step_report import StepReport, spread, total

EVEN = {"data": 0.001, "forward": 0.004, "backward": 0.008, "optimizer": 0.002, "other": 0.0005}


def test_parts_and_the_residue_of_their_medians_add_up_to_the_step() -> None:
    ranks = [[{**EVEN, "forward": 0.004 + 0.001 * number} for number in range(5)] for _ in range(2)]
    report = StepReport.of(ranks)
    assert report.step == pytest.approx(total(EVEN) + 0.002)
    assert report.residue == pytest.approx(0.0)
    alternating = StepReport.of([[{**EVEN, "data": 0.010}, {**EVEN, "forward": 0.013}, EVEN]])
    assert alternating.residue == pytest.approx(0.009)  # medians of data and forward are those of an even step
    assert alternating.to_json()["residue"] == alternating.residue


def test_a_log_point_is_spread_over_all_steps() -> None:
    steps = [{**EVEN, **({"logging": 0.01} if number == 4 else {})} for number in range(5)]
    assert [step["logging"] for step in spread(steps)] == pytest.approx([0.002] * 5)
    report = StepReport.of([steps])
    assert report.parts["logging"].median == pytest.approx(0.002)
    assert report.step == pytest.approx(total(EVEN) + 0.002)


def test_the_slowest_rank_is_shown_beside_the_median() -> None:
    ranks = [[{**EVEN, "data": seconds}] * 3 for seconds in (0.001, 0.001, 0.05)]
    data = StepReport.of(ranks).parts["data"]
    assert (data.median, data.largest) == (0.001, 0.05)
    head, first, *_ = StepReport.of(ranks).rows(several=True)
    assert head[-1] == "slowest rank" and first == ["data", "1.00", "6.5", "50.00 ms"]
    assert StepReport.of(ranks).rows(several=False)[0] == ["part", "ms", "%"]


def test_notes_say_where_communication_is_and_that_steps_are_uneven() -> None:
    even, uneven = StepReport.of([[EVEN] * 3]), StepReport.of([[EVEN, EVEN, {**EVEN, "data": 0.1}]])
    assert "after its last gradient" in even.notes("ddp", several=True, separate=True)[0]
    assert "can't be separated" in even.notes("fsdp", several=True, separate=False)[0]
    assert even.notes("ddp", several=False, separate=True) == []
    assert "uneven" in uneven.notes("ddp", several=False, separate=True)[0]
