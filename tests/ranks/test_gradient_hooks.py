"""Hooks on the gradients of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from paceline.errors import PacelineError
from worlds import launch, ranks


class Later:
    """Registers a hook after the first step, and removes the first one after the third."""

    def __init__(self, model: nn.Module, handle: Any) -> None:
        self.model, self.handle = model, handle

    def on_step(self, record: Any) -> None:
        if record.step == 1:
            for name, parameter in self.model.named_parameters():
                if name == "4.weight":
                    parameter.register_hook(lambda gradient: gradient / gradient.norm())
        if record.step == 3:
            self.handle.remove()


def losses_of(**settings: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    mask = (torch.arange(16)[:, None] % 2).double()

    def halve(gradient: Tensor) -> None:
        gradient.mul_(0.5)

    handle = model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))
    model[2].weight.register_hook(lambda gradient: gradient * mask)  # a plain tensor with a shard
    model[2].weight.register_hook(halve)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    callbacks = [Later(model, handle)]
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, callbacks=callbacks, precision="fp64", **settings)
    return trainer.train(tiny.blobs(), max_steps=8).losses


@pytest.mark.parametrize("layout", ["ddp:2", "fsdp:2", "pp:2", "hsdp:4"])
def test_hooks_receive_the_gradient_of_the_step(layout: str) -> None:
    strategy, number = layout.split(":")
    found = launch(losses_of, ranks=int(number), strategy=strategy, clip_norm=0.5)
    assert found == pytest.approx(losses_of(clip_norm=0.5), rel=1e-9)


@pytest.mark.parametrize("number", [1, 2])
def test_hooks_are_called_once_for_accumulated_micro_batches(number: int) -> None:
    assert launch(losses_of, ranks=number, accumulate=2) == pytest.approx(losses_of(), rel=1e-9)


@ranks(2)
def test_hooks_after_accumulation_are_refused() -> None:
    trainer = tiny.classifier_trainer()
    trainer.model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(PacelineError) as caught:
        trainer.train(tiny.blobs(), max_steps=1)
    assert caught.value.code == "train.post-accumulate-hook" and "0.weight" in str(caught.value)
