"""One training script, for every way of launching it, and the loss that each of its steps has in plain python."""

from __future__ import annotations

import json
import multiprocessing
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

# In float64, where sums in another order differ by so little that a wrong curve can't hide behind it.
_SCRIPT = """
import json, os
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from paceline import Trainer

torch.manual_seed(1)
inputs = torch.randn(160, 8, dtype=torch.float64)
data = TensorDataset(inputs, (inputs[:, 0] + inputs[:, 1] > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).double()
optimizer = {"name": "adamw", "lr": 1e-2}
trainer = Trainer(model, optimizer, criterion=torch.nn.CrossEntropyLoss(), batch=16, run=False, quiet=True)
losses = trainer.train(data, max_steps=20).losses
if trainer.is_main_process:
    Path(__file__).with_name("curve.json").write_text(json.dumps([int(os.environ.get("WORLD_SIZE", "1")), losses]))
"""


def write_script(folder: Path) -> str:
    (folder / "script.py").write_text(_SCRIPT)
    return str(folder / "script.py")


def assert_same(folder: Path, ranks: int = 2) -> None:
    """What was launched in that folder has had the losses of plain python, on that many ranks."""
    world, losses = _curve(folder)
    assert world == ranks
    assert losses == pytest.approx(_in_plain_python(), rel=1e-9)


def launch(folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    """The script with one rank on each machine, by a `paceline launch` that starts on this one."""
    command = [sys.executable, "-P", "-m", "paceline", "launch", "-n", "1", "--cpu", *arguments, write_script(folder)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(folder)


@cache
def _in_plain_python() -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        how = {"target": runpy.run_path, "args": (write_script(Path(name)),), "kwargs": {"run_name": "__main__"}}
        process = multiprocessing.get_context("fork").Process(**how)  # torch is imported already
        process.start()
        process.join()
        assert process.exitcode == 0
        world, losses = _curve(Path(name))
    assert world == 1 and len(losses) == 20 and losses[-1] < 0.8 * losses[0]
    return losses


def _curve(folder: Path) -> tuple[int, list[float]]:
    world, losses = json.loads((folder / "curve.json").read_text())
    return world, losses
