"""Buffers and parameters of a criterion: part of checkpoints, of the reduction and of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from heard import heard
from paceline import dist
from paceline.errors import LayoutError
from worlds import ranks

_ROWS = torch.randn(46, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
_DATA = TensorDataset(_ROWS, _ROWS[:, :3].argmax(1))


class Centered(nn.Module):
    """The center of DINO. With `average` it is computed over the samples of all ranks."""

    def __init__(self, average: bool = False) -> None:
        super().__init__()
        self.average = average
        self.register_buffer("center", torch.zeros(3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs - self.center, targets)
        if torch.is_grad_enabled():
            with torch.no_grad():
                mean = outputs.detach().mean(0)
                if self.average:
                    dist.all_reduce(mean, "mean")
                self.center.mul_(0.8).add_(0.2 * mean)
        return loss


class Weighing(nn.Module):
    """Two losses, weighed by what is learned (Kendall et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = torch.stack([F.cross_entropy(outputs, targets), outputs.square().mean()])
        return ((-self.logs).exp() * losses + self.logs).sum()


def model_and_optimizer(criterion: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(8, 3).double()
    parameters = [*model.parameters(), *criterion.parameters()]
    return model, torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def trained_on(criterion: nn.Module, stop: int | None = None, **settings: Any) -> tuple[list[float], list[str]]:
    model, optimizer = model_and_optimizer(criterion)
    options: Any = {"batch": 12, "shuffle": False, "precision": "fp64", "device": "cpu", "log_every": 1, "quiet": True}
    with heard() as said:
        trainer = paceline.Trainer(model, optimizer, criterion=criterion, **{"run": False, **options, **settings})
        return trainer.train(_DATA, epochs=2, max_steps=stop).losses, said


def losses_of_torch(criterion: nn.Module) -> list[float]:
    model, optimizer = model_and_optimizer(criterion.double())
    losses = []
    for start in [*range(0, 46, 12)] * 2:
        inputs, targets = _DATA[start : start + 12]
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [Centered, Weighing])
def test_a_resumed_run_continues_with_the_state_of_its_criterion(kind: Any, tmp_path: Path) -> None:
    expected = losses_of_torch(kind())
    settings: Any = {"run": str(tmp_path / "run"), "resume": "auto"}
    first, second = kind(), kind()
    losses = trained_on(first, stop=3, **settings)[0] + trained_on(second, **settings)[0]
    assert losses == pytest.approx(expected, rel=1e-12) and trained_on(kind())[1] == []


def test_an_evaluation_leaves_the_state_of_a_criterion_alone() -> None:
    criterion = Centered().double()
    model, optimizer = model_and_optimizer(criterion)
    options: Any = {"criterion": criterion, "batch": 12, "device": "cpu", "run": False, "quiet": True}
    paceline.Trainer(model, optimizer, precision="fp64", **options).evaluate(_DATA)
    assert not criterion.center.any()


@ranks(2)
def test_parameters_of_a_criterion_are_trained_on_all_ranks() -> None:
    expected = Weighing()
    losses = losses_of_torch(expected)
    for settings in ({}, {"accumulate": 2}):
        criterion = Weighing()
        found, said = trained_on(criterion, **settings)
        assert said == [] and found == pytest.approx(losses, rel=1e-9)
        assert torch.allclose(criterion.logs, expected.logs, rtol=1e-9)
    with pytest.raises(LayoutError) as caught:
        trained_on(Weighing(), strategy="fsdp")
    assert caught.value.code == "layout.criterion-parameters"


@ranks(2)
def test_a_buffer_that_depends_on_a_ranks_samples_is_named() -> None:
    said = trained_on(Centered())[1]
    assert ["computes center of the criterion from the samples of one rank" in line for line in said] == [True] * (
        dist.rank() == 0
    )
    assert trained_on(Centered(average=True))[1] == []


def test_a_buffer_that_every_micro_batch_changes_is_named() -> None:
    said = trained_on(Centered(), accumulate=3)[1]
    assert len(said) == 1 and "criterion.center once per micro-batch" in said[0]


def test_parameters_of_a_criterion_that_the_optimizer_lacks_are_named() -> None:
    model, criterion = nn.Linear(8, 3), Weighing()
    options: Any = {"criterion": criterion, "device": "cpu", "run": False, "quiet": True}
    with heard() as said:
        for optimizer in (None, torch.optim.SGD(model.parameters(), lr=0.1)):
            paceline.Trainer(model, optimizer, **options)
    assert ["<criterion>.logs" in line for line in said] == [True, True]
