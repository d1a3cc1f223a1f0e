"""What is read about a run, and what is said to be missing."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ledgers import Line
from paceline.config.recipe import Config, effective
from paceline.run import heartbeat, ledger
from paceline.run.folder import RunFolder
from paceline.run.ledger import NO_WORD
from paceline.run.lock import RunLock
from paceline.tools.watch.run_facts import (
    RunState,
    SavedCheckpoint,
    checked_checkpoints,
    find_state,
    read_facts,
    recipe_rows,
    saved_checkpoints,
)
from watched import FAILED, FINISHED, HOSTILE, START, run_folder, step


def test_the_facts_of_a_finished_run(tmp_path: Path) -> None:
    facts = read_facts(run_folder(tmp_path))
    assert (facts.step, facts.total_steps, facts.batch, facts.updated) == (10, 10, 8, START + 10)
    assert facts.problems == [] and facts.recipe() == {"batch": 8}
    account = facts.goodput()
    assert account is not None and account.total == 10


def test_an_empty_folder(tmp_path: Path) -> None:
    facts = read_facts(RunFolder(tmp_path))
    assert facts.state.name == "unknown" and facts.step is None and facts.goodput() is None and facts.recipe() is None
    assert facts.problems == [
        "ledger.jsonl is missing: state and times are unknown", "metrics.jsonl is missing: no metrics",
    ]  # fmt: skip
    assert facts.updated == tmp_path.stat().st_mtime_ns / 1e9


def test_heartbeats_are_ahead_of_the_metrics_of_a_running_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    heartbeat.open_writer(folder.heartbeat(0)).at(99)
    assert read_facts(folder).step == 10
    lock = RunLock(folder)
    lock.take()
    assert read_facts(folder).step == 99
    lock.release()


def test_numbers_that_no_run_writes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, [step(1, time=1e300)])
    with folder.ledger.open("a") as file:
        file.write('{"time": 1e400, "event": "x"}\n{"time": 1, "event": ["x"]}\n{"time": "1", "event": "x"}\n')
        file.write('{"time": 1763220001, "event": "saved", "step": 1e400, "seconds": 1e400}\n' + "[" * 100_000)
    facts = read_facts(folder)
    assert [event["event"] for event in facts.events] == [name for _, name, _ in (FINISHED[0],)] + ["saved"] + [
        name for _, name, _ in FINISHED[1:]
    ]
    assert facts.goodput() is None and facts.updated == START + 10
    for text in (
        "[" * 100_000,
        "[1]",
        '{"horizon": 3}',
        '{"horizon": {"value": "3"}}',
        '{"horizon": {"value": -1}}',
        "\xff",
    ):
        folder.derived.write_text(text)
        assert read_facts(folder).total_steps is None


def test_a_recipe_that_is_not_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    for text in ("- 1\n", "a: [", "a: &a [*a]\n", "x" * 1_000_000, "\x00"):
        folder.config.write_text(text)
        assert read_facts(folder).recipe() is None
    folder.config.unlink()
    folder.config.symlink_to("/etc/passwd")
    assert read_facts(folder).recipe() is None


def test_every_key_with_its_origin(tmp_path: Path) -> None:
    config = Config.from_dict({"batch": 8, "model": "gpt"}, ["optimizer.lr=0.5"], origin="recipe.yaml")
    rows = {
        key: (value, origin) for key, value, origin in recipe_rows(run_folder(tmp_path / "r", config=effective(config)))
    }
    assert rows["batch"] == ("8", "recipe.yaml") and rows["optimizer.lr"] == ("0.5", "override optimizer.lr=0.5")
    assert rows["tf32"] == ("false", "default") and rows["sync"] == ("null", "default")


def test_recipes_that_cannot_be_read(tmp_path: Path) -> None:
    assert recipe_rows(run_folder(tmp_path / "a", config="[1, 2")) == []
    folder = run_folder(tmp_path / "b", config="seed: 1\n")
    assert recipe_rows(folder) == [("seed", "1", "")]
    folder.config.unlink()
    (tmp_path / "secret.yaml").write_text("seed: 7\n")
    folder.config.symlink_to(tmp_path / "secret.yaml")
    assert recipe_rows(folder) == []


LAUNCHED = FINISHED[0]


def state(folder: RunFolder) -> str:
    return str(find_state(folder, ledger.events(folder)))


def ended(status: Any) -> Line:
    return (START + 8, "ended", {"status": status})


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (FINISHED, "finished"),
        (FINISHED[:3], "finished"),
        (FAILED, "failed (ValueError on rank 1)"),
        (FAILED[:3], "failed (ValueError on rank 1)"),
        ((LAUNCHED, ended(143)), "interrupted (SIGTERM)"),
        ((LAUNCHED, ended(7)), "failed (exit status 7)"),
        ((LAUNCHED, ended("x" * 1000)), "failed (unknown cause)"),
        ((*FAILED[:3], (START + 6, "launched", {"generation": 1}), ended(0)), "finished"),
        ((*FAILED, (START + 7, "launched", {"generation": 0})), f"interrupted ({NO_WORD})"),
        ((LAUNCHED,), f"interrupted ({NO_WORD})"),
        ((), "unknown (no ledger)"),
        (((START, "stepped", {"step": 1}),), "unknown"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, events: tuple[Line, ...], expected: str) -> None:
    assert state(run_folder(tmp_path, events=events)) == expected


def test_a_run_that_starts_has_no_lock_yet(tmp_path: Path) -> None:
    assert state(run_folder(tmp_path, events=[(time.time() - 3, "launched", {})])) == "running (starting)"
    assert not RunFolder(tmp_path).lock.exists()


def test_a_run_whose_lock_is_held_is_running(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, events=[LAUNCHED])
    lock = RunLock(folder)
    lock.take()
    try:
        assert state(folder) == "running"
        hung = [{"time": START, "event": "launched"}, {"time": START, "event": "hang"}]
        assert str(find_state(folder, hung)) == "running (hung)"
    finally:
        lock.release()
    assert state(folder) == f"interrupted ({NO_WORD})"


def test_a_copied_run_may_still_run_elsewhere(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, events=[LAUNCHED])
    folder.lock.write_text(json.dumps({"host": "node7", "pid": 3, "since": "2026"}))
    assert state(folder) == "unknown (last seen running on node7)"


def test_a_cause_from_elsewhere_is_cleaned() -> None:
    assert str(RunState("failed", HOSTILE)) == "failed (abcd e[bold]<script>alert(1)</script>)"


def test_checkpoints_newest_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name, size in (("step-000002", 5), ("step-000010", 7), (".step-000011.partial-1f2e", 9), ("mine", 3)):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "rank-0.safetensors").write_bytes(b"x" * size)
    (folder.checkpoints / "step-000020").symlink_to("/")
    folder.latest.write_text("step-000010\n")
    folder.best.write_text("step-000002\nstep-000010\n")
    assert saved_checkpoints(folder) == [
        SavedCheckpoint("step-000010", 10, 7, ["latest", "best"]),
        SavedCheckpoint("step-000002", 2, 5, ["best"]),
        SavedCheckpoint("mine", None, 3, []),
    ]


def test_the_size_is_that_of_the_shards(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    checkpoint(folder, "step-000006")
    assert [each.size for each in saved_checkpoints(folder)] == [7], "as paceline checkpoint ls says"


def test_no_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert saved_checkpoints(folder) == []
    folder.checkpoints.symlink_to("/")
    assert saved_checkpoints(folder) == []


def checkpoint(folder: RunFolder, name: str, size: int = 7) -> Path:
    path = folder.checkpoints / name
    path.mkdir(parents=True)
    (path / "rank-0.safetensors").write_bytes(b"x" * 7)
    body = json.dumps({"files": {"rank-0.safetensors": {"bytes": size}}}).encode()
    (path / "manifest.json").write_bytes(body)
    (path / "manifest.xxh128").write_text(f"{xxhash.xxh3_128_hexdigest(body)}  manifest.json\n")
    return path


def test_what_is_wrong_with_a_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    checkpoint(folder, "step-000006")
    checkpoint(folder, "step-000005", size=8)
    (checkpoint(folder, "step-000004") / "manifest.xxh128").write_text("0\n")
    (checkpoint(folder, "step-000003") / "manifest.json").unlink()
    (checkpoint(folder, "step-000002") / "rank-0.safetensors").unlink()
    odd = checkpoint(folder, "step-000001")
    for body in (b"[]", b"{", b'{"files": {"../../x": {"bytes": 1}}}'):
        (odd / "manifest.json").write_bytes(body)
        (odd / "manifest.xxh128").write_text(xxhash.xxh3_128_hexdigest(body))
        assert checked_checkpoints(folder)[-1]["check"] == "incomplete"
    assert [each["check"] for each in checked_checkpoints(folder)] == [
        "complete", "incomplete", "manifest corrupted", "no manifest", "incomplete", "incomplete",
    ]  # fmt: skip


def test_a_checkpoint_of_the_software_is_complete(tmp_path: Path) -> None:
    fixture = Path(__file__).parents[3] / "contract" / "fixture" / "step-000006"
    shutil.copytree(fixture, RunFolder(tmp_path).checkpoints / fixture.name)
    assert [each["check"] for each in checked_checkpoints(RunFolder(tmp_path))] == ["complete"]
