"""`paceline ls`, `show` and `compare` on runs of this machine."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import forked
from paceline.run.folder import RunFolder
from paceline.run.study_folder import StudyFolder
from watched import HOSTILE, run_folder

SMALL: dict[str, Any] = {
    "model": {"name": "mlp", "inputs": 64, "width": 16},
    "data": {"name": "shapes", "size": 8, "channels": 1, "length": 256},
    "batch": 32,
    "train": {"max_steps": 12},
    "eval_every": 4,
    "log_every": 2,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, a failed one, a study and an empty folder."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    done = forked.paceline("train", "-n", "2", "small.yaml", "run=good", cwd=folder)
    assert done.returncode == 0, done.stderr
    failed = forked.paceline(
        "train", "-n", "1", "small.yaml", "run=bad", "optimizer.name=sgd", "optimizer.lr=1e30", cwd=folder
    )
    assert failed.returncode == 1, failed.stderr
    study = StudyFolder(folder / "runs" / "sweep")
    study.create()
    study.write_settings({})
    run_folder(study.trial(0).path)
    (folder / "runs" / "empty").mkdir()
    return folder


def said(*words: str, cwd: Path) -> str:
    done = forked.paceline(*words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ls(trained: Path) -> None:
    lines = {words[0]: words[1:] for words in map(str.split, said("ls", cwd=trained).splitlines())}
    assert list(lines) == ["run", "bad", "good", "sweep"]
    assert lines["good"][:4] == ["finished", "12", "of", "12"] and "samples/s" in lines["good"]
    assert lines["bad"][:2] == ["failed", "(train.nonfinite"] and "nan" in lines["bad"]
    assert lines["sweep"][:4] == ["study", "of", "1", "trial:"]
    found = json.loads(said("ls", "--all", "--json", cwd=trained))
    assert [each["name"] for each in found] == ["bad", "good", "sweep", "sweep/trials/0000"]
    assert found[1]["state"] == "finished" and found[1]["step"] == found[1]["total_steps"] == 12


def test_ls_without_runs(tmp_path: Path) -> None:
    assert said("ls", cwd=tmp_path) == "No runs found in 'runs'.\n"
    missing = forked.paceline("ls", "elsewhere", cwd=tmp_path)
    assert missing.returncode == 2 and "[checkpoint.no-run]" in missing.stderr


def test_show(trained: Path) -> None:
    text = said("show", "good", cwd=trained)
    assert text.startswith("runs/good: finished\n  step 12 of 12, epoch 1, ") and "2 ranks, 1 node" in text
    assert "validation loss" in text and "step-000012" in text and "time in training steps" in text
    assert "logs: runs/good/logs (2 ranks)" in text
    found = json.loads(said("show", "runs/good", "--json", cwd=trained))
    assert found["metrics"]["loss"]["count"] == 12 and found["ranks"] == 2 and found["missing"] == []
    assert found["checkpoints"][0]["marks"] == ["latest"]


def test_show_says_why_a_run_failed(trained: Path) -> None:
    text = said("show", "bad", cwd=trained)
    assert "failed: train.nonfinite on rank 0" in text and "[train.nonfinite]" in text


def test_show_of_something_else(trained: Path) -> None:
    for name in ("empty", "sweep", "runs/other"):
        done = forked.paceline("show", name, cwd=trained)
        assert done.returncode == 2 and "[checkpoint.no-run]" in done.stderr


def test_compare(trained: Path) -> None:
    lines = [line.split() for line in said("compare", "good", "bad", cwd=trained).splitlines()]
    assert ["run", "runs/good", "runs/bad"] in lines and ["optimizer.lr", "0.001", "1e+30"] in lines
    assert ["loss", "at", "step", "runs/good", "runs/bad"] in lines
    for by in ("time", "samples"):
        assert "final loss" in said("compare", "good", "bad", "--by", by, cwd=trained)
    alone = forked.paceline("compare", "good", cwd=trained)
    assert alone.returncode == 2 and "two runs" in alone.stderr


def test_a_copy_that_was_cut_off_and_changed(trained: Path, tmp_path: Path) -> None:
    """Read-only, with a truncated metrics file, hostile text and without a ledger."""
    name = HOSTILE.replace("\0", "").replace("/", "")
    folder = RunFolder(tmp_path / "runs" / name)
    folder.path.mkdir(parents=True)
    metrics = RunFolder(trained / "runs" / "good").metrics.read_bytes()
    record = json.dumps({"evaluation": True, "step": 12, HOSTILE: 1.0})
    folder.metrics.write_bytes(record.encode() + b"\n" + metrics[:-20])
    folder.config.write_text(json.dumps({"batch": HOSTILE}))
    folder.path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        texts = [said("ls", cwd=tmp_path), said("show", name, cwd=tmp_path)]
        texts.append(said("compare", name, str(trained / "runs" / "good"), cwd=tmp_path))
    finally:
        folder.path.chmod(stat.S_IRWXU)
    assert not set("".join(texts)) & set("\x1b\r\x00\x9b\u202e")
    assert "unknown (no ledger)" in texts[0] and "1 unreadable line" in texts[1]
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "metrics.jsonl"]


def test_a_run_is_running_until_it_is_interrupted(trained: Path, tmp_path: Path) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    words = ("train", "-n", "1", str(trained / "small.yaml"), "run=long", "train.max_steps=1000000")
    process = forked.start(lambda: forked.command(*words), tmp_path, null, null)
    os.close(null)
    deadline, states = time.monotonic() + 60, set[str]()
    while "running" not in states and time.monotonic() < deadline:
        states |= {each["state"] for each in json.loads(said("ls", "--json", cwd=tmp_path)) if each["step"]}
    os.kill(process, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 143
    assert states == {"running"}
    assert said("show", "long", cwd=tmp_path).startswith("runs/long: interrupted (SIGTERM)\n")
