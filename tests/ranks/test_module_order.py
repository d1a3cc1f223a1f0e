"""Ranks that run different modules, or run them in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tiny
from paceline import dist
from paceline.errors import PacelineError
from worlds import launch, ranks

Choose = Callable[["Experts", Tensor], list[int]]


class Experts(nn.Module):
    """Runs the experts that `choose` returns, one after the other."""

    def __init__(self, choose: Choose, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        kinds = [nn.BatchNorm1d(16) if norm else nn.Tanh() for _ in range(2)]
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), kind) for kind in kinds])
        self.choose, self.forwards = choose, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += self.training
        hidden = self.first(inputs)
        for number in self.choose(self, inputs):
            hidden = hidden + self.experts[number](hidden)
        outputs: Tensor = self.last(hidden)
        return outputs


def by_sample(model: Experts, inputs: Tensor) -> list[int]:
    return [int(inputs[0, 1] > 0)]


def in_turn(model: Experts, inputs: Tensor) -> list[int]:
    """Another order on rank 1 from the fourth training forward on; the first is the pre-flight's."""
    return [1, 0] if dist.rank() == 1 and model.forwards > 4 else [0, 1]


def equally_dropped(model: Experts, inputs: Tensor) -> list[int]:
    """Stochastic depth with the same seed on every rank, and all layers in evaluation."""
    if not model.training:
        return [1, 0]
    return [[0, 1], [0], [1], []][model.forwards % 4]


def losses_of(strategy: str) -> list[float]:
    """Batches of one sample per rank."""
    data = TensorDataset(*tiny.blobs()[:40])
    model = Experts(by_sample)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch": 2, "precision": "fp64", "unused_parameters": "allow", "shuffle": False}
    # Two micro-batches of one sample on one rank; one on each of two ranks.
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, strategy=strategy, micro_batch=1, **settings)
    return trainer.train(data, max_steps=8).losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_experts_chosen_by_the_sample_train_as_on_one_rank(strategy: str) -> None:
    assert launch(losses_of, ranks=2, strategy=strategy) == pytest.approx(losses_of("single"), rel=1e-9)


def code_of(work: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(PacelineError) as caught:
        work()
    return caught.value.code, str(caught.value)


@ranks(2)
def test_another_expert_on_a_rank_is_an_error_before_it_is_gathered() -> None:
    model = Experts(lambda model, inputs: [dist.rank()])
    settings = {"unused_parameters": "allow", "blocks": ["experts.*"]}
    trainer = tiny.classifier_trainer(model, strategy="fsdp", **settings)
    code, text = code_of(lambda: trainer.train(tiny.blobs(), max_steps=2))
    assert code == "layout.different-modules"
    assert "rank 0: experts.0" in text and "rank 1: experts.1" in text


@ranks(2)
def test_a_rank_that_skips_an_expert_is_an_error() -> None:
    model = Experts(lambda model, inputs: [0, 1][: 2 - dist.rank()])
    trainer = tiny.classifier_trainer(model, strategy="fsdp", blocks=["experts.*"])
    code, text = code_of(lambda: trainer.train(tiny.blobs(), max_steps=2))
    assert code == "layout.different-modules" and "rank 1: no further module" in text


@ranks(2)
def test_a_rank_that_departs_later_is_an_error_on_that_rank() -> None:
    trainer = tiny.classifier_trainer(Experts(in_turn), strategy="fsdp", blocks=["experts.*"], timeout=2.0)
    if dist.rank() == 1:
        code, text = code_of(lambda: trainer.train(tiny.blobs(), max_steps=8))
        assert code == "layout.different-modules"
        assert "called experts.1 after 0 other modules, where the first forward called experts.0" in text
        assert "1 of 2 ranks" in text
    else:  # waits for experts.0 of the other rank, which has left
        with pytest.raises(Exception, match=r"(?i)connection|closed|timed out"):
            trainer.train(tiny.blobs(), max_steps=8)


def dropped_losses(strategy: str) -> list[float]:
    model = Experts(equally_dropped)
    settings = {"precision": "fp64", "unused_parameters": "allow", "blocks": ["experts.*"]}
    trainer = tiny.classifier_trainer(model, strategy=strategy, **settings)
    history = trainer.train(tiny.blobs(), tiny.blobs(13, first=1), max_steps=9)
    return [*history.losses, *(each["loss"] for each in history.evaluations)]


def test_modules_that_all_ranks_skip_are_allowed() -> None:
    two = launch(dropped_losses, ranks=2, strategy="fsdp")
    assert two == pytest.approx(dropped_losses("single"), rel=1e-9)


@ranks(2)
def test_a_synchronized_batch_norm_that_only_one_rank_runs_is_an_error() -> None:
    model = Experts(lambda model, inputs: [dist.rank()], norm=True)
    trainer = tiny.classifier_trainer(model, strategy="ddp", unused_parameters="allow")
    code, text = code_of(lambda: trainer.train(tiny.blobs(), max_steps=2))
    assert code == "layout.different-modules" and "rank 1: experts.1.1" in text


def by_size(model: Experts, inputs: Tensor) -> list[int]:
    """Rank 1 runs a part of a batch in another order, as the pre-flight does."""
    return [1, 0] if dist.rank() == 1 and len(inputs) < 4 else [0, 1]


@ranks(2)
def test_an_order_that_differs_in_the_preflight_is_an_error() -> None:
    trainer = tiny.classifier_trainer(Experts(by_size), strategy="fsdp", blocks=["experts.*"], batch=8, timeout=8.0)
    if dist.rank() == 1:
        code, _ = code_of(lambda: trainer.train(tiny.blobs(), max_steps=2))
        assert code == "layout.different-modules"
    else:
        with pytest.raises(Exception, match=r"(?i)connection|closed|timed out"):
            trainer.train(tiny.blobs(), max_steps=2)
