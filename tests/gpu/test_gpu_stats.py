from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.monitor import gpu_stats
from paceline.monitor.gpu_stats import Nvml

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu")


def test_nvml_describes_the_device_of_this_process() -> None:
    device = torch.device("cuda", 0)
    held = torch.ones(2**28, device=device)  # 1 GiB
    nvml = Nvml.open(device)
    assert nvml is not None
    began = time.perf_counter()
    found = nvml.sample()
    print(f"a sample takes {(time.perf_counter() - began) * 1e6:.0f} µs: {found}")
    assert {"utilization", "temperature", "clock", "max_clock", "throttled"} <= found.keys()
    assert found["memory"] >= held.nbytes and 0 < found["temperature"] < 110
    assert 0 < found["clock"] <= found["max_clock"]


def test_training_writes_what_the_gpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stats, "SECONDS", 0.02)
    data = TensorDataset(torch.ones(64, 64), torch.ones(64, 1))
    trainer = paceline.Trainer(
        nn.Linear(64, 1), "sgd", criterion=nn.MSELoss(), device="cuda", batch=8, run=str(tmp_path / "run"), quiet=True
    )
    trainer.train(data, max_steps=1000)
    lines = (tmp_path / "run" / "events" / "rank-00000.jsonl").read_text().splitlines()
    gpus = [record["gpu"] for record in map(json.loads, lines) if "gpu" in record]
    assert gpus and gpus[-1]["memory"] > 0
