from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline import Trainer, dist
from paceline.monitor import gpu_stats
from paceline.plan import slow_input
from paceline.plan.network_model import Traffic
from paceline.train.rates import Rates


class Slow(Dataset[tuple[Tensor, Tensor]]):
    draws_randomness = False

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.seconds)
        return torch.ones(4), torch.ones(1)


def train(data: Any, run: str | bool = False, steps: int = 30, **settings: Any) -> None:
    model = nn.Linear(4, 1)
    settings = {"batch": 4, "log_every": 5, "quiet": True, "run": run, "save_last": False, **settings}
    Trainer(model, "sgd", criterion=nn.MSELoss(), device="cpu", **settings).train(data, max_steps=steps)


def advised(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "training waits for data" in line]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_input, "WINDOW", 0.05)


@pytest.mark.usefixtures("soon")
def test_slow_reading_is_reported_with_a_number_of_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Slow(0.002), str(tmp_path / "run"))
    line = advised(capsys)[0]
    found = re.search(r"reading takes ([\d.]+) ms a step in the training process, .*; workers: (\d+) would", line)
    assert found is not None and float(found[1]) >= 8 and int(found[2]) >= 1
    records = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 0.1 < records[-1]["data_wait"] <= 1


@pytest.mark.usefixtures("soon")
def test_workers_report_the_time_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    train(Slow(0.005), workers=1, steps=20, micro_batch=2)
    found = re.search(r"reading takes ([\d.]+) ms a step in one worker", advised(capsys)[0])
    assert found is not None and float(found[1]) >= 20


def one_slow_rank() -> list[list[str]]:
    """What each rank logs if the second one reads slowly."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    slow_input.WINDOW = 0.05
    train(Slow(0.004 * dist.rank()), preflight=False)
    return [[text for text in rank if "training waits for data" in text] for rank in dist.all_gather_object(seen)]


def test_the_first_rank_reports_the_slowest_one() -> None:
    first, second = paceline.launch(one_slow_rank, ranks=2)
    found = re.search(r"reading takes ([\d.]+) ms", first[0])
    assert found is not None and float(found[1]) >= 8
    assert second == []


def test_the_numbers_of_a_gpu_travel_between_those_of_a_rank_and_its_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = {"utilization": 0.9, "temperature": 91, "clock": 990, "max_clock": 1980, "throttled": ["heat"]}
    monkeypatch.setattr(gpu_stats.Nvml, "open", lambda device: SimpleNamespace(sample=lambda: sample))
    flops = SimpleNamespace(per_sample=None, peak=None)
    mesh = SimpleNamespace(device=torch.device("cuda"), data_ranks=1, degrees=None)
    said, traffic = list[str](), Traffic()
    rates = Rates(cast(Any, flops), cast(Any, mesh), said.append, 1, traffic)
    assert rates._gpu is not None
    interval = slow_input.Interval(1.0, 10, 0.0)
    rates.own(interval)  # the first log point
    for _ in range(gpu_stats.THROTTLED):
        rates._gpu.sample()
    traffic.all_reduce(1_000_000, 2)
    sums = rates.own(interval)
    assert rates.combine(sums, 1.0, interval, 10) == {} and rates.sent(sums, 10)["sent_mb"] == 0.1
    assert said[0].startswith("the GPU of rank 0 throttles: it is too hot (91 °C")
    assert rates.of_rank() == {"gpu": sample}
