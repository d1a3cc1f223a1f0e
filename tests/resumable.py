"""A small model with data and trainers, for tests that stop and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs.to(self.first.weight.dtype))))
        result: torch.Tensor = self.last(hidden)
        return result.float()


def points(count: int = 64) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=draw), torch.randn(count, 1, generator=draw))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        data = points()
        return (data[index] for index in range(64))


def trainer(model: Callable[[], nn.Module] = Net, optimizer: Any = None, scheduler: Any = None, **settings: Any) -> Any:
    torch.manual_seed(1)
    built = model()
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(built.parameters())
    options = {"criterion": nn.MSELoss(), "batch": 8, "run": False, "quiet": True, **settings}
    return paceline.Trainer(built, made, scheduler=scheduler(made) if scheduler else None, **options)


def require_same_end(make: Any, folder: Path, data: Any, at: int = 4, steps: int = 12, **ends: Any) -> None:
    """Trained to `at`, saved, loaded into a fresh trainer and trained on: as without a stop."""
    ends = ends or {"max_steps": steps}
    whole, first, second = make(), make(), make()
    whole.train(data, **ends)
    first.train(data, max_steps=at)
    first.save_checkpoint(folder / "c")
    second.load_checkpoint(folder / "c")
    second.train(data, **ends)
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    expected = whole.model.state_dict()
    assert [n for n, tensor in second.model.state_dict().items() if not torch.equal(tensor, expected[n])] == []
