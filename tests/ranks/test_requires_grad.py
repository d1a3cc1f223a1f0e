"""Parameters that are frozen or unfrozen during training."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from heard import heard
from paceline import dist
from paceline.errors import PacelineError
from worlds import launch, ranks


class Schedule:
    """Unfreezes layer 0 after step 2, freezes layer 2 for three steps, then alternates between the halves."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def on_step(self, record: Any) -> None:
        step = record.step
        trained = {0: step >= 2, 2: not 3 <= step < 6, 4: True}
        if step >= 7:
            trained = {0: step % 2 == 0, 2: step % 2 == 0, 4: step % 2 == 1}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trained[int(name.split(".")[0])])


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def losses_of(**settings: Any) -> list[float]:
    model = classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, callbacks=[Schedule(model)], **settings)
    return trainer.train(tiny.blobs(), max_steps=14).losses


def logged(work: Any) -> list[str]:
    """What `work` logs."""
    with heard(logging.NOTSET) as lines:
        work()
    return lines


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_equal_those_of_one_rank(strategy: str, accumulate: int) -> None:
    one = losses_of(precision="fp64")
    two = launch(losses_of, ranks=2, strategy=strategy, accumulate=accumulate, precision="fp64")
    assert two == pytest.approx(one, rel=1e-9)


@ranks(2)
def test_frozen_shards_can_be_unfrozen_under_mixed_precision() -> None:
    losses = losses_of(strategy="fsdp", precision="bf16")
    assert losses[-1] < losses[0]


@ranks(2)
def test_ddp_is_built_twice_for_a_set_that_comes_back_and_then_kept() -> None:
    lines = logged(lambda: losses_of(strategy="ddp", quiet=False))
    rebuilt = [line for line in lines if line.startswith("ddp: rebuilt")]
    # Four changes before the alternation; its sets are built twice, one of them once before.
    assert len(rebuilt) == (7 if dist.rank() == 0 else 0)
    if rebuilt:
        assert "0.weight, 0.bias unfrozen" in rebuilt[0] and "2.weight, 2.bias frozen" in rebuilt[1]


@ranks(2)
def test_parameters_that_differ_between_ranks_are_an_error() -> None:
    model = classifier()
    trainer = tiny.classifier_trainer(model, strategy="ddp", timeout=0.6)
    trainer.train(tiny.blobs(), max_steps=1)
    model[2 * dist.rank()].requires_grad_(False)
    with pytest.raises(PacelineError) as caught:
        trainer.train(tiny.blobs(), max_steps=2)
    assert caught.value.code == "train.requires-grad-differs"
    assert f"{2 * dist.rank()}.weight to False" in str(caught.value) and "1 of 2 ranks" in str(caught.value)


@ranks(2)
def test_a_change_between_unreduced_micro_batches_is_an_error() -> None:
    model, data = classifier(), tiny.blobs()
    trainer = tiny.classifier_trainer(model, strategy="ddp")
    first = 8 * dist.rank()
    with trainer.no_sync():
        trainer.backward(trainer.forward(data[first : first + 8]))
    model[0].requires_grad_(False)
    with pytest.raises(PacelineError) as caught:
        trainer.forward(data[first : first + 8])
    assert caught.value.code == "train.requires-grad-in-step"


@ranks(2)
def test_an_unfrozen_parameter_that_the_optimizer_does_not_hold_is_reported() -> None:
    model = classifier()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, quiet=False)
    before = logged(lambda: trainer.train(tiny.blobs(), max_steps=1))
    model[0].requires_grad_(True)
    after = logged(lambda: trainer.train(tiny.blobs(), max_steps=2))
    assert not any("not updated" in line for line in before)
    assert any("not updated: 0.weight, 0.bias" in line for line in after) == (dist.rank() == 0)
