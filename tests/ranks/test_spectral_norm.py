"""Spectral norms, whose estimate changes in every forward, and layers of other pipeline ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

import tiny
from paceline import dist
from paceline.errors import LayoutError
from worlds import launch, ranks

KINDS: dict[str, Any] = {"hook": spectral_norm, "parametrization": parametrizations.spectral_norm}


def losses_of(kind: str, **settings: Any) -> list[float]:
    torch.manual_seed(0)
    normed = [KINDS[kind](nn.Linear(16, 16)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), normed[0], nn.Tanh(), normed[1], nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, precision="fp64", **settings)
    return trainer.train(tiny.blobs(), max_steps=6).losses


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_changes_once_per_step(kind: str) -> None:
    one = losses_of(kind)
    assert losses_of(kind, accumulate=2) == pytest.approx(one, rel=1e-9)
    assert losses_of(kind, recompute="full", blocks=["2", "4"]) == pytest.approx(one, rel=1e-9)
    assert launch(losses_of, ranks=2, kind=kind, strategy="pp") == pytest.approx(one, rel=1e-9)
    assert launch(losses_of, ranks=2, kind=kind, strategy="ddp", accumulate=2) == pytest.approx(one, rel=1e-9)


@ranks(2)
def test_a_layer_of_another_pipeline_rank_keeps_its_index_and_can_not_be_used() -> None:
    model = tiny.classifier()
    names = [name for name, _ in model.named_parameters()]
    trainer = tiny.classifier_trainer(model, strategy="pp")
    here, absent = (model[0], model[2]) if dist.rank() == 0 else (model[2], model[0])
    assert isinstance(here, nn.Linear) and len(model) == 3
    with pytest.raises(LayoutError) as caught:
        absent.weight.mul_(0.5)
    assert caught.value.code == "layout.absent-layer"
    assert f"Layer {2 - 2 * dist.rank()} " in str(caught.value) and f"rank {1 - dist.rank()}" in str(caught.value)
    assert not hasattr(absent, "weight") and not list(absent.parameters())
    with pytest.raises(LayoutError):
        absent(torch.zeros(1, 16))
    assert [name for name, _ in model.named_parameters()] == names[2 * dist.rank() :][:2]
    trainer.train(tiny.blobs(), max_steps=1)
    saved = trainer.state_dict()
    assert list(saved) == names or dist.rank() == 1
