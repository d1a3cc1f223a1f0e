"""Figures of `paceline bench scaling` from measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.tools.bench.scaling import ScalingEntry, folder_of, heading, newest, notes, rows, slowest, store, waiting


def measured(ranks: int, milliseconds: float, **others: Any) -> dict[str, Any]:
    step = {"forward": milliseconds / 1e3}
    facts = {"cores": 16, "local_ranks": ranks, "device": "cpu", "memory": [1 << 20] * ranks, "unpredictable": ""}
    return {"ranks": ranks, "batch": 32, "steps": [[step] * 3] * ranks, **facts, **others}


def entry(ranks: int, milliseconds: float, mode: str = "strong", **others: Any) -> ScalingEntry:
    return ScalingEntry.of(mode, measured(ranks, milliseconds, **others))


def communicating() -> ScalingEntry:
    """A second bucket is ready with the last gradient; both take 2 ms, and the step waits for 3 ms."""
    link = {"latency": 0.0, "bandwidth": 1e9, "worst_error": 0.0}
    steps = [[{"backward": 0.010, "communication": wait}] * 3 for wait in (0.004, 0.003)]
    compute = [[{"backward": seconds}] * 3 for seconds in (0.009, 0.010)]
    parts = {"buckets": [[0.001, 2_000_000], [0.0, 2_000_000]], "link": link, "compute": compute, "steps": steps}
    return entry(2, 0.0, **parts)


def test_the_slowest_rank_counts_in_each_step_and_the_one_that_waits_least() -> None:
    ranks = [[{"communication": 1.0}, {"communication": 5.0}], [{"communication": 3.0}, {"communication": 2.0}]]
    assert slowest(ranks) == 4.0
    assert waiting(ranks) == 1.5
    logs, even = {"forward": 1.0, "logging": 0.5}, {"forward": 1.0}
    logging = [[logs, {"forward": 3.0}], [{**logs, "logging": 8.0}, even]]
    assert slowest(logging) == 2.0 + 0.25


def test_efficiency_is_throughput_per_rank_relative_to_the_first_entry() -> None:
    _, one, two = rows("strong", [entry(1, 40.0), entry(2, 25.0)], None)
    assert (one[2], one[3], two[2], two[3]) == ("800.0", "100 %", "1280.0", "80 %")
    assert (one[4], two[4]) == ("–", "90–95 %")


def test_a_link_whose_bandwidth_no_bucket_shows_has_none() -> None:
    found = communicating()
    assert "link of 2 ranks: 0 µs, 1.00 GB/s" in notes([found], None)
    assert found.link is not None
    [said] = notes([replace(found, predicted=None, link=replace(found.link, bandwidth=math.inf))], None)
    assert said.startswith("link of 2 ranks: 0 µs, no bandwidth shows")


def test_headings_have_the_batch() -> None:
    entries = [entry(2, 40.0), entry(2, 40.0, "weak"), entry(4, 50.0, "weak")]
    assert heading("strong", entries) == "strong scaling: batch 32"
    assert heading("weak", entries) == "weak scaling: batch 16 per rank"
    assert heading("weak", entries[:1]) == "weak scaling: no figures"


def test_expectations_are_relative_to_one_rank() -> None:
    assert rows("strong", [entry(2, 40.0), entry(4, 25.0)], None)[2][4] == "–"


def test_a_prediction_adds_what_is_left_of_the_reduction_to_the_slowest_computation() -> None:
    found = communicating()
    assert found.communication == pytest.approx(0.004)
    assert found.predicted == pytest.approx(0.010 + 0.003)  # the first bucket begins 1 ms before the end
    assert found.error == pytest.approx(0.013 / 0.0135 - 1)
    assert found.hidden == pytest.approx(0.25)


def test_a_failed_entry_is_named_and_the_others_are_shown() -> None:
    entries = [entry(1, 40.0), ScalingEntry("strong", 64, failed="[config.batch-smaller-than-ranks] A batch …")]
    assert len(rows("strong", entries, None)) == 2
    assert "failed: 64 ranks (strong): [config.batch-smaller-than-ranks]" in notes(entries, None)[0]
    assert entries[1].to_json() == {"mode": "strong", "ranks": 64, "failed": entries[1].failed}


def test_a_layout_without_prediction_says_why() -> None:
    found = entry(2, 25.0, unpredictable="fsdp communicates inside forward and backward")
    assert (found.predicted, found.hidden, found.error) == (None, None, None)
    assert "no prediction: fsdp communicates inside forward and backward" in notes([found], None)


def test_the_difference_to_an_earlier_result_is_a_column() -> None:
    before = {
        "date": "2026-11-15",
        "host": "a",
        "entries": [entry(1, 50.0).to_json(), entry(2, 25.0, "weak").to_json()],
    }
    head, one, two = rows("strong", [entry(1, 40.0), entry(2, 25.0)], before)
    assert (head[-1], one[-1], two[-1]) == ("change", "+25.0 %", "–")
    assert any("since 2026-11-15 on a" in note for note in notes([entry(1, 40.0)], before))


def test_the_newest_readable_result_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    (tmp_path / "2001-01-01T00-00-00.json").write_text('{"value": 1}')
    assert newest(tmp_path) == {"value": 1}
    path = store(tmp_path, {"value": 2})
    found = newest(tmp_path)
    assert found is not None and found["value"] == 2 and set(found["versions"]) == {"paceline", "torch", "python"}
    path.write_text("damaged")
    assert newest(tmp_path) == {"value": 1}


def test_the_name_of_a_recipe_may_contain_anything() -> None:
    assert folder_of("scaling", "my recipe/é", "0a").name == "scaling-my-recipe---0a"
