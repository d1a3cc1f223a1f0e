"""Random numbers that are drawn from a rank's generator are named after the first step; others are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import paceline


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Augmentation draws from the global generators while the loop reads data."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6) * random.random(), torch.zeros(4)


class Model(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self._change = nn.Linear(6, 6), nn.Linear(6, 4), change
        self.recurrent: nn.Module | None = None
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._change(self, self.first(x)))


def once(model: Any, x: Tensor) -> Tensor:
    if model.table is None:
        model.table = torch.randn(6) + torch.rand(6)
    return x + model.table


def layer_drop(model: Any, x: Tensor) -> Tensor:
    return x if torch.rand([]) < 0.5 else x * 2


def tokens_first(model: Any, x: Tensor) -> Tensor:
    return x + functional.dropout(x.expand(3, *x.shape).flatten(0, 1)[1:], 0.1).sum(0)


def python_random(model: Any, x: Tensor) -> Tensor:
    return x * 2 if random.random() < 0.5 else x


DRAWS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "normal": (lambda model, x: x + torch.randn_like(x), "randn_like of shape (4, 6) ("),
    "in place": (lambda model, x: x + torch.empty_like(x).normal_(), "normal_ of shape (4, 6) ("),
    "permutation": (lambda model, x: x[:, torch.randperm(6)], "randperm of shape (6,) ("),
    "layer drop": (layer_drop, "rand of shape () ("),
    "dropout of tokens": (tokens_first, "dropout of shape (11, 6) ("),
    "Python": (python_random, "Python's random"),
    "NumPy": (lambda model, x: x * float(numpy.random.rand()), "numpy.random"),
}
COVERED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nothing": lambda model, x: x,
    "dropout": lambda model, x: functional.dropout(x, 0.1),
    "noise": lambda model, x: x + paceline.noise(x),
    "stochastic depth": lambda model, x: x * (torch.rand(len(x), 1) < 0.5),
    "initialized once": once,
    "without effect": lambda model, x: x * 2 if torch.rand([]) < 0.0 else x,
}


def lines_of(model: nn.Module, capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    trainer = paceline.Trainer(
        model, {"name": "sgd", "lr": 0.1}, criterion=nn.MSELoss(), batch=4, run=False, device="cpu", **settings
    )
    capsys.readouterr()
    trainer.train(Lines(), max_steps=2)
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if "random numbers" in line)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_from_a_generator_are_named_with_their_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, expected = DRAWS[name]
    found = lines_of(Model(change), capsys)
    assert found.startswith(f"random numbers: {expected}") and "; " not in found.partition(" are drawn")[0]
    assert f"in {change.__name__}: " in found or not expected.endswith("(")
    assert expected in found and not found.startswith("warning") and found.count("random numbers:") == 1
    assert ("test_random_draws.py:" in found) is expected.endswith("(")


@pytest.mark.parametrize("name", COVERED)
def test_random_numbers_by_sample_are_not_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines_of(Model(COVERED[name]), capsys) == ""


LATE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "begins": (lambda model, x: x + torch.randn_like(x) if model.strength else x, "randn_like of shape (4, 6) ("),
    "grows": (lambda model, x: x + model.strength * torch.randn_like(x), "randn_like of shape (4, 6) ("),
    "Python": (lambda model, x: x * random.random() if model.strength else x, "Python's random"),
    "NumPy": (lambda model, x: x * float(numpy.random.rand()) if model.strength else x, "numpy.random"),
    "noise": (lambda model, x: x + paceline.noise(x) if model.strength else x, ""),
    "no effect": (lambda model, x: x if torch.rand([]) < 0.5 else x * 1.0, ""),
}


@pytest.mark.parametrize("name", LATE)
def test_draws_that_begin_after_the_first_epoch_are_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, expected = LATE[name]
    model: Any = Model(change)
    model.strength = 0.0

    class Switch:
        def on_epoch(self, record: Any) -> None:
            model.strength = 0.5

    settings = {"criterion": nn.MSELoss(), "batch": 4, "run": False, "device": "cpu", "callbacks": [Switch()]}
    trainer = paceline.Trainer(model, {"name": "sgd", "lr": 0.1}, **settings)
    capsys.readouterr()
    trainer.train(Lines(), epochs=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if "random numbers" in line]
    assert [line.startswith(f"random numbers: {expected}") for line in lines] == [True] * bool(expected)


@pytest.fixture
def recurrent() -> Iterator[Model]:
    def run(model: Any, x: Tensor) -> Tensor:
        output: Tensor = model.recurrent(x.unsqueeze(1))[0].squeeze(1)
        return output

    model = Model(run)
    model.recurrent = nn.LSTM(6, 6, 2, batch_first=True, dropout=0.1)
    yield model


def test_dropout_inside_recurrent_layers_is_named(recurrent: Model, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nn.LSTM(dropout=…) (" in lines_of(recurrent, capsys)


def test_draws_are_named_with_accumulation(capsys: pytest.CaptureFixture[str]) -> None:
    assert "randn_like of shape (2, 6)" in lines_of(Model(DRAWS["normal"][0]), capsys, accumulate=2)
    assert lines_of(Model(COVERED["stochastic depth"]), capsys, accumulate=2) == ""


def test_naming_draws_does_not_change_the_run() -> None:
    def losses(preflight: bool) -> list[float]:
        torch.manual_seed(0)
        trainer = paceline.Trainer(
            Model(DRAWS["normal"][0]), {"name": "sgd", "lr": 0.1}, criterion=nn.MSELoss(),
            batch=4, run=False, quiet=True, device="cpu", log_every=1, preflight=preflight,
        )  # fmt: skip
        return trainer.train(Lines(), max_steps=2).losses

    assert losses(preflight=True) == losses(preflight=False)
