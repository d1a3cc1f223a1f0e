"""What a finished run leaves on disk: names of files, keys of a checkpoint's manifest and of records.

Other programs read these. Inner modules may move; these names may not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import forked
import snapshots

# The embedded recipe, made small.
SMALL = [
    "model.layers=1", "model.width=16", "model.context=16", "data.context=16", "data.size=20000", "batch=8", "ema=0.9",
    "device=cpu", "strategy=fsdp", "loggers=[csv]", "schedule.name=plateau", "save_best=loss", "early_stop=5",
    "save_every=2", "eval_every=2", "log_every=1", "train.max_steps=4", "keep=1", "run=small",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = forked.paceline("train", "-n", "2", *SMALL, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "small"


def keys(values: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({key for each in values for key in each})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_of_a_finished_run(run: Path) -> None:
    """Including that none is left behind: no socket, no partial checkpoint, no temporary file."""
    snapshots.compare("run_files", sorted(str(path.relative_to(run)) for path in run.rglob("*") if not path.is_dir()))


def test_keys_of_a_manifest(run: Path) -> None:
    manifest = json.loads((run / "checkpoints" / "step-000004" / "manifest.json").read_text())
    entries = manifest["tensors"].values()
    snapshots.compare(
        "manifest",
        {
            "format": manifest["format"],
            "keys": sorted(manifest),
            **{f"keys of {part}": sorted(manifest[part]) for part in ("data", "layout", "state", "versions")},
            "keys of a file": keys(manifest["files"].values()),
            "keys of a tensor": keys(entries),
            "keys of a chunk": keys(chunk for entry in entries for chunk in entry["chunks"]),
            "tensors": sorted(manifest["tensors"]),
        },
    )


def test_keys_of_records(run: Path) -> None:
    records = lines(run / "metrics.jsonl")
    snapshots.compare(
        "records",
        {
            "step": keys(record for record in records if not record.get("evaluation")),
            "evaluation": keys(record for record in records if record.get("evaluation")),
            "metrics.csv": (run / "metrics.csv").read_text().splitlines()[0].split(","),
            "ledger.jsonl": keys(lines(run / "ledger.jsonl")),
            "derived.json": sorted(json.loads((run / "derived.json").read_text())),
        },
    )
