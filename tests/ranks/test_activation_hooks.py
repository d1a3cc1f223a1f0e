"""Hooks on activations and autograd functions see the gradients of one process, on any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from heard import heard
from paceline import dist
from samples import ALL
from worlds import ranks

_INPUTS = torch.randn(26, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
_LABELS = _INPUTS[:, :3].argmax(1)
_LIMIT = 2e-3


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-_LIMIT, _LIMIT)


class ClampsGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return clamped(gradient)


class Observed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(6, 16), nn.Linear(16, 3)
        if how == "module":
            self.last.register_full_backward_hook(lambda module, gradients, outputs: (clamped(gradients[0]),))

    def hidden(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        if self.how in ("tensor", "checkpoint") and hidden.requires_grad:
            hidden.register_hook(clamped)
        return ClampsGradient.apply(hidden) if self.how == "function" else hidden  # type: ignore[no-any-return]

    def forward(self, inputs: Tensor) -> Tensor:
        if self.how == "checkpoint":
            hidden = checkpoint(self.hidden, inputs.requires_grad_(torch.is_grad_enabled()), use_reentrant=True)
        else:
            hidden = self.hidden(inputs)
        return self.last(hidden)  # type: ignore[no-any-return]


def mean_loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def squared_loss(model: Any, batch: Any) -> Any:
    return (model(batch[0]) - F.one_hot(batch[1], 3)).square().mean()


def loss_of_some(model: Any, batch: Any) -> Any:
    """Later batches have ignored targets."""
    targets = batch[1].masked_fill(batch[0][:, 5] > 1.0, -100)
    return F.cross_entropy(model(batch[0]), targets)


def loss_as_sum(model: Any, batch: Any) -> Any:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    weights = 0.5 + batch[0][:, 1].abs()
    return paceline.Loss((losses * weights).sum(), weights.sum())


LOSSES: tuple[Callable[[Any, Any], Any], ...] = (mean_loss, squared_loss, loss_of_some, loss_as_sum)


def observed_model(how: str) -> tuple[Observed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Observed(how).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def trained_in_one_process(how: str, loss: Callable[[Any, Any], Any]) -> Tensor:
    model, optimizer = observed_model(how)
    for _ in range(2):
        for start in range(0, 26, 8):
            optimizer.zero_grad()
            result = loss(model, (_INPUTS[start : start + 8].clone(), _LABELS[start : start + 8]))
            (result.sum / result.weight if isinstance(result, paceline.Loss) else result).backward()
            optimizer.step()
    return model.first.weight.detach()


def weights_apart(how: str, loss: Callable[[Any, Any], Any], custom: bool = False, **settings: Any) -> float:
    model, optimizer = observed_model(how)
    options: Any = {"batch": 8, "shuffle": False, "precision": "fp64", "device": "cpu", "run": False, "quiet": True}
    trainer = paceline.Trainer(model, optimizer, loss_fn=loss, **options, **settings)
    data = TensorDataset(_INPUTS.clone(), _LABELS)
    if custom:
        for _ in range(2):
            for batch in trainer.loader(data):
                trainer.backward(trainer.forward(batch))
                trainer.step()
    else:
        trainer.train(data, epochs=2)
    weights = trainer.state_dict() or {"first.weight": trained_in_one_process(how, loss)}
    return float((weights["first.weight"] - trained_in_one_process(how, loss)).abs().max())


def test_the_hook_matters() -> None:
    assert (trained_in_one_process("tensor", mean_loss) - trained_in_one_process("none", mean_loss)).abs().max() > 1e-3


@ranks(2)
def test_two_ranks_train_as_one_process() -> None:
    for strategy in ("ddp", "fsdp"):
        losses = LOSSES if ALL or strategy == "ddp" else LOSSES[2:]
        apart = {f"{loss.__name__}": weights_apart("tensor", loss, strategy=strategy) for loss in losses}
        hows = ("module", "function", "checkpoint") if ALL or strategy == "fsdp" else ("checkpoint",)
        apart |= {how: weights_apart(how, mean_loss, strategy=strategy) for how in hows}
        apart["custom loop"] = weights_apart("tensor", mean_loss, custom=True, strategy=strategy)
        assert {name: value for name, value in apart.items() if value > 1e-12} == {}, strategy


@pytest.mark.parametrize("world", [1, 2])
def test_micro_batches_train_as_one_process(world: int) -> None:
    @ranks(world)
    def body() -> None:
        apart = {loss.__name__: weights_apart("tensor", loss, accumulate=2) for loss in (mean_loss, squared_loss)}
        apart |= {how: weights_apart(how, mean_loss, accumulate=2) for how in ("module", "function")}
        assert {name: value for name, value in apart.items() if value > 1e-12} == {}

    body()


def said_in(how: str, loss: Callable[[Any, Any], Any], **settings: Any) -> list[str]:
    with heard() as said:
        weights_apart(how, loss, **settings)
    return said


@ranks(2)
def test_what_cannot_be_right_is_named() -> None:
    for settings in ({"accumulate": 2}, {"sync": {"every": 2}}):
        said = said_in("tensor", loss_of_some if "accumulate" in settings else mean_loss, **settings)
        assert ["train.scaled-activations" in line for line in said] == [True] * (dist.rank() == 0), said
    assert said_in("none", loss_of_some, accumulate=2) == []
