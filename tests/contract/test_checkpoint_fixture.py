"""A checkpoint that an earlier version wrote loads with the same bits, and the training continues as it did then.

tests/format2.py made it, and says how. A change that needs a new fixture is a new format, and has to read both.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
import format2
import paceline

EXPECTED = json.loads((format2.FOLDER / "expected.json").read_text())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy, as nothing may write into the committed one."""
    return Path(shutil.copytree(format2.CHECKPOINT, tmp_path / format2.CHECKPOINT.name))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def state(checkpoint: Path) -> dict[str, Any]:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    return {key: manifest[key] for key in ("format", "step", "epoch", "optimizer", "state", "metadata")}


def load_and_save(strategy: str, checkpoint: str, again: str) -> dict[str, Any]:
    counts = format2.Counts()
    trainer = format2.trainer(strategy, counts)
    metadata = trainer.load_checkpoint(checkpoint)
    assert torch.equal(metadata["mean"], format2.METADATA["mean"])
    assert {**metadata, "mean": None} == {**format2.METADATA, "mean": None}
    trainer.save_checkpoint(again, metadata=metadata)
    return {"step": trainer.step_count, "epoch": trainer.epoch, **counts.state_dict()}


def resume(strategy: str, checkpoint: str, run: str) -> dict[str, list[float]]:
    return format2.train(format2.trainer(strategy, run=run, resume=checkpoint))


@pytest.mark.parametrize("strategy", format2.LAYOUTS)
def test_it_loads_and_is_saved_again_with_the_same_bits(checkpoint: Path, tmp_path: Path, strategy: str) -> None:
    ranks, again = format2.LAYOUTS[strategy], tmp_path / "again"
    names = {"checkpoint": str(checkpoint), "again": str(again)}
    found = paceline.launch(load_and_save, ranks=ranks, strategy=strategy, **names)
    assert found.pop("sum").tolist() == [6.0, 21.0]
    assert found == {"step": 6, "epoch": 1, "seen": 6}
    assert state(again) == state(format2.CHECKPOINT)
    found, expected = format2.hashes(again), EXPECTED["tensors"]
    if ranks != 2:  # another number of ranks seeds its generators anew
        found, expected = (
            {name: bits for name, bits in each.items() if not name.startswith("random/")} for each in (found, expected)
        )
    assert found == expected


@pytest.mark.parametrize("strategy", format2.LAYOUTS)
def test_training_continues_from_it(checkpoint: Path, tmp_path: Path, strategy: str) -> None:
    before = content(checkpoint)
    ranks, run = format2.LAYOUTS[strategy], tmp_path / "run"
    found = paceline.launch(resume, ranks=ranks, strategy=strategy, checkpoint=str(checkpoint), run=str(run))
    # Rounding differs between processors: that of another training is thousands of times this. Evaluations differ
    # more: the gradient of the bias before the batch norm is nothing but rounding, which AdamW scales to its learning
    # rate, and the running mean lags behind it. Noise of the size of rounding there changes them by 1e-4.
    bounds = {"losses": 1e-5, "rates": 1e-5, "evaluations": 1e-3}
    assert found == {name: pytest.approx(values, rel=bounds[name]) for name, values in EXPECTED[strategy].items()}
    assert content(checkpoint) == before


def test_it_is_whole(tmp_path: Path) -> None:
    done = forked.paceline("checkpoint", "verify", str(format2.CHECKPOINT), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert format2.hashes(format2.CHECKPOINT) == EXPECTED["tensors"]
