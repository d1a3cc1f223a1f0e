"""On one rank, training equals a plain torch loop bit for bit, also with models that keep state of any kind; and on
several ranks, the pre-flight changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import TensorDataset

import paceline
from paceline.runtime import rng
from worlds import ranks

STEPS, BATCH = 4, 6


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.mul_(1.5).add_(0.3)
        return self.layer(inputs)


class Counts(InPlace):
    """Anneals a temperature by its own counter, saved as extra state."""

    calls = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(inputs) / (1 + 0.1 * self.calls)


class Remembers(InPlace):
    """Keeps a running mean, past outputs and a cache, in every kind of attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.past: list[float] = []
        self.state: dict[str, Any] = {"scale": torch.ones(1)}
        self.cache: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs)
        if self.cache is None:
            self.cache = outputs.detach().mean(0)
        self.mean = 0.5 * self.mean + 0.5 * outputs.detach().mean(0)
        self.past.append(float(outputs.detach().sum()))
        self.state["scale"].mul_(0.9)
        return (outputs - self.mean - self.cache + sum(self.past[:-1]) * 0.01) * self.state["scale"]


class Draws(InPlace):
    """Draws from the global generators and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.generator = nn.Dropout(0.5), torch.Generator().manual_seed(3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.dropout(inputs) + 0.1 * torch.randn(inputs.shape, generator=self.generator))


class Renormalizes(InPlace):
    """A forward that changes parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 8, max_norm=0.7)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs + self.rows(torch.arange(len(inputs)) % 8))


class Unfreezes(InPlace):
    def __init__(self) -> None:
        super().__init__()
        self.layer.bias.requires_grad_(False)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.layer.bias.requires_grad_(True)
        return self.layer(inputs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "in place": InPlace,
    "counter": Counts,
    "attributes": Remembers,
    "random": Draws,
    "max norm": Renormalizes,
    "unfreezes": Unfreezes,
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(8, 4)), nn.Linear(4, 2)),
}


class Smoothed(nn.Module):
    """A criterion with state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1 / self.calls)


def counting_loss() -> Callable[[Any, Any], Tensor]:
    calls = 0

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) / calls

    return loss


def built(name: str) -> tuple[nn.Module, Tensor, Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    inputs = torch.randn(STEPS * BATCH, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, inputs, (inputs[:, 0] > 0).long(), optimizer


def with_trainer(name: str, **loss: Any) -> list[Any]:
    model, inputs, targets, optimizer = built(name)
    settings = {"batch": BATCH, "shuffle": False, "quiet": True, "run": False, "dropout": "per-rank"}  # torch's masks
    trainer = paceline.Trainer(model, optimizer, **settings, **loss)
    losses = trainer.train(TensorDataset(inputs, targets), epochs=1).losses
    return [losses, *model.state_dict().values()]


def by_hand(name: str, loss: Callable[[nn.Module, list[Tensor]], Tensor]) -> list[Any]:
    model, inputs, targets, optimizer = built(name)
    rng.seed_everything(rng.derive_seed(0, 1, 0) >> 1)  # as the Trainer does with its `seed`, for step 1 and rank 0
    losses = []
    for start in range(0, len(inputs), BATCH):
        optimizer.zero_grad()
        # A loader copies samples into a batch.
        value = loss(model, [inputs[start : start + BATCH].clone(), targets[start : start + BATCH]])
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return [losses, *model.state_dict().values()]


def same(one: list[Any], other: list[Any]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_equals_a_plain_loop(name: str) -> None:
    criterion, other = Smoothed(), Smoothed()
    expected = by_hand(name, lambda model, batch: other(model(batch[0]), batch[1]))
    assert same(with_trainer(name, criterion=criterion), expected)
    assert same(with_trainer(name, loss_fn=counting_loss()), by_hand(name, counting_loss()))


@ranks(2)
def test_two_ranks_are_not_affected_by_the_preflight() -> None:
    for name in ("in place", "counter", "attributes", "random", "batch norm", "spectral norm"):
        for key, make in (("criterion", Smoothed), ("loss_fn", counting_loss)):
            assert same(*[with_trainer(name, preflight=on, **{key: make()}) for on in (True, False)]), (name, key)
