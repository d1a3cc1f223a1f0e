from __future__ import annotations

import json
import time
from pathlib import Path

import torch

import paceline
from paceline.monitor import rank_stats
from paceline.monitor.rank_stats import RankStats, process_memory
from paceline.run.folder import RunFolder


def test_each_rank_writes_its_own_file(tmp_path: Path) -> None:
    before = time.time()
    for rank in (0, 3):
        events = RankStats(RunFolder(tmp_path).rank_stats(rank))
        events.log_point(step=10, samples_per_second=12.5, data_wait=0.25, memory=100, peak_memory=200)
        events.log_point(step=20, samples_per_second=float("nan"), data_wait=0.0, memory=100, peak_memory=200)
        events.close()
    assert sorted(path.name for path in (tmp_path / "events").iterdir()) == ["rank-00000.jsonl", "rank-00003.jsonl"]
    first, second = map(json.loads, (tmp_path / "events" / "rank-00003.jsonl").read_text().splitlines())
    assert before - 1 <= first.pop("time") <= time.time() + 1
    assert first == {"step": 10, "samples_per_second": 12.5, "data_wait": 0.25, "memory": 100, "peak_memory": 200}
    assert (second["step"], second["samples_per_second"]) == (20, None)


def test_memory_of_a_cpu_process_follows_what_it_holds_and_the_peak_stays() -> None:
    size = 256 * 2**20
    before, _ = process_memory(torch.device("cpu"))
    held = torch.ones(size, dtype=torch.uint8)
    with_tensor, _ = process_memory(torch.device("cpu"))
    del held
    after, peak = process_memory(torch.device("cpu"))
    assert with_tensor - before > 0.9 * size
    assert with_tensor - after > 0.9 * size
    assert peak > before + 0.9 * size


def test_versions_host_and_command_are_recorded() -> None:
    found = rank_stats.describe()
    assert found["torch"] == torch.__version__ and found["paceline"] == paceline.__version__
    assert {"command", "host", "python", "started", "system"} <= found.keys()
    assert all(isinstance(value, str) for value in found.values()) and "CUDA" not in found
