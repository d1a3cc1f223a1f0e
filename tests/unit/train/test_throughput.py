"""FLOPs per sample, as they are written at log points: `tflops_per_device` over all ranks, by samples per second."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import Dataset, TensorDataset

import paceline
import tiny
from paceline import Trainer, dist
from paceline.monitor import gpu_stats
from paceline.plan import slow_input
from paceline.plan.network_model import Traffic
from paceline.train.throughput import Throughput
from samples import sample


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
    seen = {"utilization": 0.9, "temperature": 91, "clock": 990, "max_clock": 1980, "throttled": ["heat"]}
    monkeypatch.setattr(gpu_stats.Nvml, "open", lambda device: SimpleNamespace(sample=lambda: seen))
    flops = SimpleNamespace(per_sample=None, peak=None)
    mesh = SimpleNamespace(device=torch.device("cuda"), data_ranks=1, degrees=None)
    said, traffic = list[str](), Traffic()
    rates = Throughput(cast(Any, flops), cast(Any, mesh), said.append, 1, traffic)
    assert rates._gpu is not None
    interval = slow_input.Interval(1.0, 10, 0.0)
    rates.own(interval)  # the first log point
    for _ in range(gpu_stats.THROTTLED):
        rates._gpu.sample()
    traffic.all_reduce(1_000_000, 2)
    sums = rates.own(interval)
    assert rates.combine(sums, 1.0, interval, 10) == {} and rates.sent(sums, 10)["sent_mb"] == 0.1
    assert said[0].startswith("the GPU of rank 0 throttles: it is too hot (91 °C")
    assert rates.of_rank() == {"gpu": seen}


MLP_FLOPS = 6 * (8 * 16 + 16 * 4) - 2 * 8 * 16
STEPS = 6


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    """A process that has compiled something does not count eager models."""
    counters.clear()


def mlp(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *between, nn.Linear(16, 4))


def pairs(count: int = 64) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 4, (count,)))


def last_record(run: str | None) -> dict[str, Any]:
    assert run is not None
    records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = [record for record in records if "samples_per_second" in record][-1]
    return found


def has_flops(record: Mapping[str, Any], expected: float, world: int = 1) -> bool:
    """Up to the rounding of the record: four digits, and two decimals of samples per second."""
    rounding = 1e-3 + 0.005 / record["samples_per_second"]
    found = record["tflops_per_device"] * 1e12 * world / record["samples_per_second"]
    return math.isclose(found, expected, rel_tol=rounding)


def trained(folder: Path, model: nn.Module | None = None, **settings: Any) -> dict[str, Any]:
    settings = {"batch": 8, "log_every": STEPS, "quiet": True, "run": str(folder / "run"), **settings}
    trainer = Trainer(
        mlp() if model is None else model, "sgd", criterion=nn.CrossEntropyLoss(), device="cpu", **settings
    )
    return last_record(trainer.train(pairs(), pairs(13), max_steps=STEPS).run)


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 3}, {"recompute": "full", "blocks": ["0"]}])
def test_flops_of_a_step_are_those_of_its_samples(settings: dict[str, Any], tmp_path: Path) -> None:
    record = trained(tmp_path, **settings)
    assert has_flops(record, MLP_FLOPS)
    assert "mfu" not in record  # a CPU has no entry in the table


class Counted(nn.Module):
    """Keeps state of every kind that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers, self.drop, self.calls = nn.BatchNorm1d(8), mlp(), nn.Dropout(0.1), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.drop(self.layers(self.norm(inputs)))
        return outputs


def test_a_compiled_model_is_counted_without_a_trace(tmp_path: Path) -> None:
    compiled, plain = Counted(), Counted()
    hooked: list[int] = []
    compiled.layers.register_forward_hook(lambda *arguments: hooked.append(compiled.calls))
    compiled.compile(backend="eager")
    record = trained(tmp_path / "compiled", compiled)
    trained(tmp_path / "plain", plain)
    # With the gradient of the inputs of the first layer, for the norm before it.
    assert has_flops(record, MLP_FLOPS + 2 * 8 * 16)
    assert compiled.calls == plain.calls and len(hooked) >= compiled.calls - 1
    assert all(map(torch.equal, compiled.state_dict().values(), plain.state_dict().values()))


def test_a_function_that_the_user_compiled_stays_compiled(tmp_path: Path) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.eager = mlp(), 0

        @torch.compile(backend=backend)
        def run(self, inputs: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                self.eager += 1
            outputs: Tensor = self.layers(inputs)
            return outputs

        def forward(self, inputs: Tensor) -> Tensor:
            return self.run(inputs)

    model = Inner()
    record = trained(tmp_path, model)
    assert has_flops(record, MLP_FLOPS)
    assert graphs and model.eager == 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)[0]
        return outputs


def test_a_model_that_cannot_be_counted_has_no_figures(tmp_path: Path) -> None:
    assert "tflops_per_device" not in trained(tmp_path, Recurrent())


def on_ranks(folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last record of a small GPT in each layout."""
    found = []
    counters.clear()  # this process is a fork of one that may have compiled something
    for number, layout in enumerate(layouts):
        run = str(Path(folder) / str(number))
        recipe = tiny.recipe("gpt", batch=8, log_every=STEPS, run=run, device="cpu", **layout)
        history = tiny.trainer_of(recipe).train(max_steps=STEPS)
        found.append(last_record(history.run))
    return found


LAYOUTS: list[dict[str, Any]] = [
    {"strategy": "ddp", "accumulate": 2},
    {"strategy": "fsdp", "recompute": "full"},
    {"strategy": "tp"},
    {"strategy": "pp"},
    {"strategy": "ddp"},
    {"strategy": "tp", "tensor": {"sequence": False}},
][: sample(4, 6)]


def test_flops_of_all_ranks_add_up_to_those_of_the_model(tmp_path: Path) -> None:
    layers, width, vocabulary, tokens = 2, 32, 256, 16
    expected = tokens * (6 * (12 * layers * width**2 + width * vocabulary) + 12 * layers * width * tokens)
    found = paceline.launch(on_ranks, ranks=2, folder=str(tmp_path), layouts=LAYOUTS)
    assert [has_flops(record, expected, world=2) for record in found] == [True] * len(LAYOUTS)


def compiled_and_sharded(folder: str) -> dict[str, Any]:
    model = mlp()
    model[0].compile(backend="eager")
    return trained(Path(folder), model, strategy="fsdp", blocks=["0"])


@pytest.mark.nightly  # 3 CPU seconds
def test_a_compiled_and_sharded_model_is_counted(tmp_path: Path) -> None:
    assert has_flops(paceline.launch(compiled_and_sharded, ranks=2, folder=str(tmp_path)), MLP_FLOPS, world=2)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(inputs)).mul(2).prod(-1)


def test_a_model_with_a_product_has_the_bits_of_a_plain_loop() -> None:
    """In a dispatch mode, torch computes the gradient of a product by another formula."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 16, generator=generator), torch.rand(8, generator=generator)) for _ in range(6)]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Product())
    settings: dict[str, Any] = {"criterion": nn.functional.mse_loss, "batch": 8, "quiet": True, "run": False}
    paceline.Trainer(models[0], {"name": "sgd", "lr": 0.5}, device="cpu", **settings).train(data, max_steps=6)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.5, fused=True)
    for inputs, targets in data:
        optimizer.zero_grad()
        nn.functional.mse_loss(models[1](inputs), targets).backward()
        optimizer.step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


class Shared(nn.Module):
    """One module under two names, and a parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.again(self.first(inputs)))
        return outputs


def test_a_compiled_model_with_shared_modules_keeps_its_parameters(tmp_path: Path) -> None:
    model = Shared()
    model.compile(backend="eager")
    record = trained(tmp_path, model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert model.last.weight is model.first.weight
    assert has_flops(record, 3 * 6 * 64 - 2 * 64)  # without the gradient of the inputs
