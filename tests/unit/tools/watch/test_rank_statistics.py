"""Statistics of ranks as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.run.folder import RunFolder
from paceline.tools.watch import rank_statistics
from paceline.tools.watch.rank_statistics import RankStatistics


def write(folder: RunFolder, rank: int, steps: range, **values: Any) -> None:
    path = folder.rank_stats(rank)
    path.parent.mkdir(exist_ok=True)
    base = {"samples_per_second": 80.0, "data_wait": 0.1, "memory": 1 << 30, "own_time": 0.05}
    with path.open("a") as file:
        file.writelines(json.dumps({"time": 1.0, "step": step, **base, **values}) + "\n" for step in steps)


def table(folder: RunFolder, columns: int = 10) -> dict[str, Any]:
    found = RankStatistics(folder)
    found.update()
    return found.table(columns, batch=8)


def test_a_slow_rank_stands_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for rank in range(3):
        write(folder, rank, range(10, 210, 10), own_time=0.05 if rank != 1 else 0.09)
    found = table(folder)
    assert found["ranks"] == [0, 1, 2] and len(found["steps"]) == 11 and not found["sampled"]
    assert found["rows"]["relative"] == [[1.0] * 10, [1.8] * 10, [1.0] * 10]
    assert found["rows"]["data_wait"][0] == [0.1] * 10 and found["rows"]["memory"][2][0] == pytest.approx(
        2**30, rel=1e-3
    )
    # A step takes 0.1 s: 0.05 s by itself, 0.01 s waiting for data, and the rest in collectives.
    assert found["rows"]["collectives"][:2] == [pytest.approx([0.4] * 10), pytest.approx([0.0] * 10)]
    assert "slowdown" not in found["rows"] and "gpu" not in found["rows"]


def test_only_what_was_appended_is_read(tmp_path: Path) -> None:
    folder, found = RunFolder(tmp_path), RankStatistics(RunFolder(tmp_path))
    write(folder, 0, range(1, 11))
    found.update()
    version = found.version
    found.update()
    assert found.version == version
    with folder.rank_stats(0).open("a") as file:
        file.write('{"step": 11, "memory": 7')
    found.update()
    with folder.rank_stats(0).open("a") as file:
        file.write('7}\n{"step": 12, "memory": 78}\n')
    found.update()
    assert found.version > version and found.table(12, 8)["rows"]["memory"][0][-2:] == [77.0, 78.0]


def test_a_resumed_run_replaces_later_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(folder, 0, range(1, 11))
    write(folder, 0, range(6, 9), memory=5)
    assert table(folder, 99)["rows"]["memory"][0][-3:] == [5.0] * 3 and table(folder, 99)["steps"][-1] == 9


def test_long_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_statistics, "_MAX_RECORDS", 4000)
    monkeypatch.setattr(rank_statistics, "_BLOCK", 1 << 12)
    folder = RunFolder(tmp_path)
    for rank in range(2):
        write(folder, rank, range(1, 20_000), own_time=0.05 * (1 + rank))
    found = table(folder, 50)
    assert found["sampled"] and len(found["rows"]["relative"][0]) == 50
    assert found["steps"][0] == 1 and found["steps"][-1] == 20_000
    assert all(value == pytest.approx(4 / 3, rel=1e-3) for value in found["rows"]["relative"][1])


def test_the_number_of_records_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_statistics, "_MAX_RECORDS", 500)
    folder, found = RunFolder(tmp_path), RankStatistics(RunFolder(tmp_path))
    for n in range(30):
        write(folder, 0, range(1 + 100 * n, 101 + 100 * n))
        found.update()
    assert len(found._files[0].steps) <= 1100 and found.table(10, 8)["steps"][-1] == pytest.approx(3000, abs=30)


def test_odd_records_and_files(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(folder, 0, range(1, 4), gpu={"utilization": 0.9}, own_time=0.0)
    with folder.rank_stats(0).open("a") as file:
        file.write('{"step": "x"}\nnot JSON\n{"step": 4, "memory": "much", "gpu": [], "data_wait": true}\n[]\n')
    folder.rank_stats(1).symlink_to(folder.rank_stats(0))
    statistics = RankStatistics(folder)
    statistics.update()
    assert statistics.ranks == [0] and statistics.problems == ["the statistics of 1 rank can't be read"]
    assert statistics.table(9, 8)["rows"]["gpu"][0] == [0.9] * 4 and "own_time" not in statistics.table(9, 8)["rows"]


def test_a_folder_of_statistics_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(RunFolder(tmp_path / "other"), 0, range(1, 3))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events").symlink_to(tmp_path / "other" / "events")
    assert table(RunFolder(tmp_path / "run"))["ranks"] == []


def test_a_rank_with_few_records_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write(folder, 0, range(1, 101))
    write(folder, 1, range(1, 3), own_time=0.5)
    found = table(folder, 50)
    assert len(found["rows"]["own_time"][0]) == 50
    assert found["rows"]["own_time"][1][0] == 0.5 and found["rows"]["own_time"][1][-1] is None, "it wrote nothing more"
