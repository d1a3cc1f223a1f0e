from __future__ import annotations

import json
from pathlib import Path

from ledgers import Line, written
from paceline.run.folder import RunFolder
from paceline.run.ledger import Ledger, events, opened_before


def test_each_note_is_a_line_of_json_with_the_wall_clock(tmp_path: Path) -> None:
    Ledger(RunFolder(tmp_path)).note("saved", step=3, seconds=0.25)
    line = json.loads((tmp_path / "ledger.jsonl").read_text())
    assert {**line, "time": 0} == {"time": 0, "event": "saved", "step": 3, "seconds": 0.25}
    assert line["time"] > 1.7e9


def test_lines_that_are_not_events_are_skipped(tmp_path: Path) -> None:
    folder = written(tmp_path, (2, "saved", {}), (1, "joined", {}))
    with folder.ledger.open("a") as file:
        for when in ('"1"', "null", "1e400", "NaN", f"1{'0' * 400}"):
            file.write(f'{{"time": {when}, "event": "x"}}\n')
        file.write('{"event": "x"}\n{"time": 3}\n[1]\n' + "[" * 100_000 + '\n{"time": 4, "ev')
    assert [event["event"] for event in events(folder)] == ["joined", "saved"]


def test_a_restarted_training_finds_the_folder_of_its_name(tmp_path: Path) -> None:
    def opened(when: float, run: str, generation: int, name: str = "net") -> Line:
        return (when, "opened", {"run": run, "name": name, "generation": generation})

    folder = RunFolder(tmp_path)
    written(tmp_path, (0, "launched", {"generation": 0}), opened(1, "/of/another/launch", 0), opened(2, "/again", 1))
    written(tmp_path, (10, "launched", {"generation": 0}), opened(11, "/a", 0), opened(12, "/other", 0, "x"))
    assert opened_before(folder, "net", 1) == RunFolder(Path("/a"))
    assert opened_before(folder, "x", 1) == RunFolder(Path("/other")) and opened_before(folder, "y", 1) is None
    written(tmp_path, opened(13, "/b", 0), (14, "launched", {"generation": 1}), opened(15, "/a", 1))
    assert opened_before(folder, "net", 1) == RunFolder(Path("/b"))  # the first one has taken its own
    assert opened_before(folder, "net", 2) == RunFolder(Path("/a"))
