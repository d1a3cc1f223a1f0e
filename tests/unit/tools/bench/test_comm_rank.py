"""What `paceline bench comm` shows, from times that are given."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

import pytest

from paceline.plan.network_model import LinkModel
from paceline.plan.sync_advice import MethodCost
from paceline.tools.bench import comm_rank
from paceline.tools.bench.collective_times import CollectiveTimes, Timing
from watched import charts_in, embedded_values

LINK = LinkModel(50e-6, 25e6)
SIZES = [1024 * 4**power for power in range(8)]


def measured(collective: str, ranks: int, sizes: list[int] = SIZES, note: str = "") -> CollectiveTimes:
    timings = [Timing(size, LINK.time(collective, size, ranks), ranks, collective) for size in sizes]
    return CollectiveTimes(collective, timings, note)


def report(*found: CollectiveTimes) -> dict[str, Any]:
    entries = {each.collective: comm_rank.entry(each) for each in found}
    return {"ranks": 4, "setting": "4 ranks on 2 nodes, gloo, cpu", "collectives": entries, "advice": None}


@pytest.mark.parametrize(
    ("collective", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("broadcast", 1)]
)
def test_bus_bandwidth_is_that_of_nccl_tests(collective: str, factor: float) -> None:
    [point] = comm_rank.entry(CollectiveTimes(collective, [Timing(1 << 20, 0.5, 4, collective)]))["points"]
    assert point["algorithm_bandwidth"] == (1 << 20) / 0.5
    assert point["bus_bandwidth"] == factor * point["algorithm_bandwidth"]


def test_an_entry_is_plain_and_holds_the_fit() -> None:
    entry = json.loads(json.dumps(comm_rank.entry(measured("all_reduce", 4))))
    assert entry["model"]["bandwidth"] == pytest.approx(25e6) and entry["model"]["latency"] == pytest.approx(50e-6)
    assert [point["bytes"] for point in entry["points"]] == SIZES


def test_one_size_has_no_fit() -> None:
    entry = comm_rank.entry(measured("all_reduce", 4, sizes=[1024]))
    assert entry["model"] is None and comm_rank.describe_fit(entry) == ""
    said = comm_rank.describe("all_reduce", entry)
    assert "1 KiB" in said and said.endswith("(--sizes), or repeat on an idle machine")


def test_a_bandwidth_that_no_size_shows_is_not_in_the_report() -> None:
    falling = [Timing(size, seconds, 2, "all_reduce") for size, seconds in ((1024, 3e-4), (4096, 2e-4))]
    entry = comm_rank.entry(CollectiveTimes("all_reduce", falling, note="stopped"))
    assert entry["model"] is None and entry["note"].startswith("stopped; no fit: the sizes show no bandwidth")
    json.dumps(entry, allow_nan=False)


def test_the_table_shows_sizes_times_bandwidths_the_fit_and_why_it_ends() -> None:
    said = comm_rank.describe("all_reduce", comm_rank.entry(measured("all_reduce", 4, note="stopped at 16 MiB")))
    assert re.search(r"size +time +algorithm bandwidth +bus bandwidth", said)
    assert re.search(r"16 MiB +1,006,933 µs +16.7MB/s +25.0MB/s", said)
    assert "fitted: 50 µs per round, 25.0MB/s; within 0 % of every size" in said
    assert said.endswith("stopped at 16 MiB")


def test_the_page_has_dots_for_measurements_and_a_dashed_line_for_each_fit() -> None:
    made = comm_rank.html(
        report(measured("all_reduce", 4), measured("broadcast", 4), CollectiveTimes("all_gather", []))
    )
    time, bandwidth = charts_in(made).values()
    assert [(each["name"], each["dashed"], len(each["line"])) for each in time["series"]] == [
        ("all_reduce", True, 41),
        ("broadcast", True, 41),
    ]
    assert all(len(each["points"]) == len(SIZES) for chart in (time, bandwidth) for each in chart["series"])
    assert time["x"]["log"] == 4 and time["y"]["log"] == bandwidth["y"]["log"] == 10
    said = str(embedded_values(made))
    assert "4 ranks on 2 nodes" in said and "fitted: 50 µs" in said


def test_advice_is_a_sentence_and_a_table_of_methods() -> None:
    costs = [MethodCost("uncompressed gradients", "", 4 << 20, 0.5, 0.91), MethodCost("int8", "x", 1 << 20, 0.01, 0.2)]
    advice = {"sentence": "use <int8>", "compute": 0.05, "methods": [asdict(each) for each in costs]}
    said = comm_rank.describe_advice(advice)
    assert said.endswith("\n\nuse <int8>") and "computes for 50.0 ms" in said
    assert re.search(r"uncompressed gradients +4 MiB +500.0 ms +91 %", said)
    made = comm_rank.html({**report(measured("all_reduce", 4)), "advice": advice})
    parts = embedded_values(made)["sheet"]["parts"]
    assert {"kind": "text", "text": "use <int8>"} in parts
    [methods] = [part["rows"] for part in parts if part.get("title") == "sync"]
    assert methods[0] == ["uncompressed gradients", "4 MiB", "500.0 ms", "91 %"]


def test_a_recipe_without_gradients_to_compress_gets_the_reason_only() -> None:
    assert comm_rank.describe_advice({"sentence": "fsdp", "compute": None, "methods": []}) == "fsdp"
