from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.run.study_folder import StudyFolder
from paceline.tools.search.study import Study

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu")
RECIPE = Path(__file__).parents[2] / "recipes" / "mlp.yaml"


def test_the_doctor_reduces_on_the_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    findings = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["all-reduce"]["status"] == "ok" and "nccl" in findings["all-reduce"]["what"]
    assert findings["GPUs"]["status"] == findings["NVIDIA driver"]["status"] == "ok"


def test_trials_take_a_gpu_each(tmp_path: Path) -> None:
    words = ["--trials", "2", "--sampler", "random", "optimizer.lr=log(1e-4,1e-1)", "train.epochs=1"]
    command = [sys.executable, "-m", "paceline", "sweep", str(RECIPE), *words]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=100)
    trials = Study.load(StudyFolder(tmp_path / "runs" / "mlp-sweep")).trials()
    assert [trial.state for trial in trials] == ["complete"] * 2
    assert all(trial.slot.startswith("GPU ") for trial in trials)
