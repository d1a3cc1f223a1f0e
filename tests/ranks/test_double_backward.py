"""Losses that contain gradients (gradient penalties, adversarial samples) in every layout, compared with one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import LayoutError
from samples import ALL
from worlds import launch, ranks

Call = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(hidden)))
        return hidden + out


class Critic(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), norm or nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.last(hidden)
        return out


def gradient(critic: Call, inputs: Tensor, *, graph: bool) -> Tensor:
    inputs = inputs.clone().requires_grad_(True)
    return torch.autograd.grad(critic(inputs).sum(), inputs, create_graph=graph)[0]


def penalty(critic: Call, batch: list[Tensor]) -> Tensor:
    return critic(batch[0]).mean() + (gradient(critic, batch[0], graph=True).norm(dim=1) - 1).square().mean()


def between_forwards(critic: Call, batch: list[Tensor]) -> Tensor:
    """The penalty's graph is needed after the backward through another forward, of which FSDP takes notice."""
    before, slopes = critic(batch[0]), gradient(critic, batch[0], graph=True)
    after = critic(batch[0] + slopes.detach())
    return before.square().mean() + slopes.square().mean() + after.square().mean()


def adversarial(critic: Call, batch: list[Tensor]) -> Tensor:
    return critic(batch[0] + 0.1 * gradient(critic, batch[0], graph=False).sign()).square().mean()


LOSSES = (penalty, between_forwards, adversarial)


def trainer_of(loss: Callable[..., Tensor], norm: nn.Module | None = None, **settings: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    critic = Critic(norm)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    settings = {"batch": 8, "run": False, "quiet": True, "precision": "fp64", **settings}
    return paceline.Trainer(critic, optimizer, loss_fn=loss, **settings)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))


def losses(cases: list[dict[str, Any]]) -> list[list[float]]:
    return [trainer_of(loss, **case).train(data(), epochs=1).losses for case in cases for loss in LOSSES]


def test_a_loss_with_gradients_equals_one_rank_in_every_layout() -> None:
    sharded = {"strategy": "fsdp", "blocks": ["blocks.*"]}
    plan = {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}
    cases = [
        {"strategy": "ddp", "recompute": "full"},
        *([sharded] if ALL else []),
        {**sharded, "recompute": "full", "accumulate": 2},
        {**sharded, "unused_parameters": "allow"},
        {"strategy": "tp", "tensor": plan},
    ]
    expected = losses([{}])
    assert losses([{"recompute": "full"}]) == expected
    found = launch(losses, ranks=2, cases=cases)
    for case, each in zip(cases, zip(*[iter(found)] * len(LOSSES), strict=True), strict=True):
        assert [pytest.approx(loss, rel=1e-12) for loss in expected] == list(each), case


def test_selective_recomputation_refuses_a_second_backward() -> None:
    with pytest.raises(LayoutError, match=r"layout\.selective-double-backward"):
        trainer_of(penalty, recompute="selective").train(data(), max_steps=1)


@ranks(2)
def test_a_synchronized_batch_norm_refuses_a_second_backward() -> None:
    with pytest.raises(LayoutError, match=r"layout\.double-backward.*batch norm"):
        trainer_of(penalty, nn.BatchNorm1d(8)).train(data(), max_steps=1)
    assert trainer_of(penalty, nn.BatchNorm1d(8), sync_batchnorm=False).train(data(), max_steps=1).losses
