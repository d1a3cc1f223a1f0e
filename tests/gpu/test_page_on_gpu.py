"""What a run on a GPU records for its page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.run.folder import RunFolder
from paceline.tools.watch import page_values
from paceline.tools.watch.live_run import LiveRun

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_devices_loss_scale_profile_and_utilization_are_on_the_page(tmp_path: Path) -> None:
    inputs = torch.randn(4096, 512)
    trainer = paceline.Trainer(
        torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 1)),
        {"name": "adamw", "lr": 1e-3},
        criterion=torch.nn.MSELoss(),
        batch=64,
        precision="fp16",
        profile=[5, 8],
        run=tmp_path / "run",
        report=True,
    )
    # The GPU is asked once a second.
    trainer.train(TensorDataset(inputs, inputs.sum(1, keepdim=True)), max_steps=3000)
    run = LiveRun(RunFolder(tmp_path / "run"))
    about, curves, ranks = page_values.about(run), page_values.curves(run), page_values.ranks(run)
    assert dict(about["environment"])["GPU of rank 0"] == torch.cuda.get_device_name()
    assert dict(about["environment"])["CUDA"] == torch.version.cuda
    assert curves["loss_scale"]["y"][0] > 0 and {"mfu", "tflops_per_device"} & curves.keys()
    assert about["profiles"][0]["compute"] > 0 and about["profiles"][0]["operations"]
    assert 0 <= ranks["rows"]["gpu"][0][-1] <= 1 and ranks["rows"]["memory"][0][-1] > 0
    assert (tmp_path / "run" / "report.html").exists()
