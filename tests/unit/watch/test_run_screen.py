"""One run on one screen."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline.run.failures import FailureRecord
from paceline.run.folder import RunFolder
from paceline.watch.run_facts import read_facts
from paceline.watch.run_screen import screen, screen_values
from watched import FAILED, FINISHED, HOSTILE, START, STEPS, evaluation, run_folder, step


def shown(folder: RunFolder) -> str:
    text = screen(read_facts(folder))
    json.dumps(screen_values(read_facts(folder)), allow_nan=False)
    assert not set(text) & set("\x1b\r\x00\x9b\u202e")
    return text


def test_a_finished_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "gpt", [*STEPS, evaluation(5, accuracy=0.5), evaluation(10, accuracy=0.4)])
    (folder.checkpoints / "step-000010").mkdir(parents=True)
    folder.latest.write_text("step-000010")
    folder.rank_log(0).write_text("text\nwarning: slow\nwarning: slow\n")
    text = shown(folder)
    assert "gpt: finished\n  step 10 of 10, epoch 0, 10.0 s, 2 ranks, 1 node, last update " in text
    assert "first 2, last 0.2, best 0.2 (step 10)" in text and "█" in text
    assert "first 0.5, last 0.4, best 0.5 (step 5)" in text and "validation accuracy" in text
    assert "last 1.0k samples/s, median 750" in text and text.count("warning: slow") == 1
    assert "step-000010  10    0.0 MiB  latest" in text
    assert "time in training steps:" in text and f"logs: {folder.logs} (1 rank)" in text
    assert len(text.splitlines()) <= 24


def test_a_failed_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, events=FAILED)
    FailureRecord(0, 2.0, 1, "later").write(folder)
    FailureRecord(1, 3.0, 1, f"[train.nonfinite] Non-finite loss\n  fix: lower it\n{HOSTILE}").write(folder)
    text = shown(folder)
    assert (
        "failed: exception on rank 1 after step 4\n  [train.nonfinite] Non-finite loss\n    fix: lower it\n  a" in text
    )
    assert "hang: rank 1 made no progress for 40 s (missing)" in text
    found = screen_values(read_facts(folder))["failure"]
    assert (found["cause"], found["rank"], found["step"]) == ("exception", 1, 4)


def test_the_first_record_if_the_rank_is_unknown(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, events=[FINISHED[0], (START + 1, "failed", {"cause": "exit", "rank": [1]})])
    for rank, text in enumerate(("later", "first")):
        FailureRecord(rank, 2.0 - rank, 1, text).write(folder)
    assert "failed: exit\n  first\n" in shown(folder)


def test_an_empty_run_says_what_is_missing(tmp_path: Path) -> None:
    text = shown(RunFolder(tmp_path))
    assert text.splitlines()[0].endswith("unknown (no ledger)") and "no steps" in text
    assert "no checkpoints" in text and "no logs" in text
    assert "ledger.jsonl is missing" in text and "metrics.jsonl is missing" in text


def test_a_truncated_metrics_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    os.truncate(folder.metrics, folder.metrics.stat().st_size - 5)
    text = shown(folder)
    assert "step 9 of 10" in text and "1 unreadable line in metrics.jsonl" in text


def test_hostile_text_in_every_field(tmp_path: Path) -> None:
    name = HOSTILE.replace("\0", "").replace("/", "")
    events = [
        (START, "launched", {"ranks": HOSTILE, "nodes": [HOSTILE], "generation": HOSTILE}),
        (START + 1, "hang", {"kind": HOSTILE, "ranks": [HOSTILE, 1], "seconds": HOSTILE}),
        (START + 1, "hang", {"kind": {}, "ranks": HOSTILE, "seconds": 1e300}),
        (START + 2, "failed", {"cause": HOSTILE, "rank": HOSTILE, "step": HOSTILE}),
    ]
    records = [step(1, loss=HOSTILE, lr=HOSTILE, epoch=HOSTILE), evaluation(1, **{HOSTILE: 1.0, "x": HOSTILE})]
    folder = run_folder(tmp_path / name, records, events, config=f"batch: {json.dumps(HOSTILE)}\n")
    (folder.checkpoints / f"step-{name}").mkdir(parents=True)
    folder.rank_log(0).write_text(f"warning: {HOSTILE}\n")
    folder.failure(3).write_text(json.dumps({"rank": HOSTILE, "time": HOSTILE, "exit_code": 1, "text": [HOSTILE]}))
    text = shown(folder)
    assert "hang: rank 1 made no progress for – s (abcd e[bold]" in text
    assert "validation abcd e[bold]<script>" in text
