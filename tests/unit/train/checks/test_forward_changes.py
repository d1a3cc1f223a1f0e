from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
from paceline import dist
from worlds import ranks


class Keeps(nn.Module):
    """Keeps the mean of its outputs, and adds it to the next ones if `uses`."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.net, self.uses, self.last = tiny.classifier(), uses, None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        if self.uses and self.last is not None:
            outputs = outputs + self.last
        self.last = outputs.detach().mean(0)
        return outputs


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = tiny.classifier(), 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.net(inputs)
        return outputs / (1 + 0.1 * self.calls)


def warnings_of(model: nn.Module, steps: int = 1, **settings: Any) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    torch.manual_seed(0)
    tiny.classifier_trainer(model, **settings).train(tiny.blobs(32), max_steps=steps)
    logging.getLogger("paceline").removeHandler(handler)
    return lines


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(2)
def test_state_of_one_rank_is_warned_about_and_a_cache_is_not(strategy: str) -> None:
    lines = warnings_of(Keeps(uses=True), strategy=strategy)
    assert [line.partition(":")[0] for line in lines] == [
        "the forward computes last from the samples of one rank" for _ in range(dist.rank() == 0)
    ]
    assert warnings_of(Keeps(uses=False), strategy=strategy) == []


def test_state_that_changes_in_every_micro_batch_is_warned_about() -> None:
    [line] = warnings_of(Counts(), accumulate=2)
    assert line.startswith("the forward changes calls once per micro-batch")
    running = Counts()
    running.register_buffer("mean", torch.zeros(()))
    running.register_forward_pre_hook(lambda module, inputs: module.mean.add_(1.0) and None)
    assert "calls, mean" in warnings_of(running, accumulate=2)[0]
    model = Counts()
    assert warnings_of(model) == []
    assert model.calls == 1


class Extra(Counts):
    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def buffered() -> nn.Module:
    model = tiny.classifier()
    model.register_buffer("mean", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, inputs: module.mean.add_(1.0) and None)
    model.register_forward_hook(lambda module, inputs, outputs: outputs / (1 + module.mean))
    return model


def test_sparse_attributes_are_left_alone() -> None:
    model = Counts()
    model.register_buffer("adjacent", torch.eye(3).to_sparse())
    assert warnings_of(model) == []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_save_names_what_a_forward_keeps_and_is_not_saved(accumulate: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run": str(tmp_path / "run"), "save_every": 1, "accumulate": accumulate}
    for model, name in ((Keeps(uses=True), "last"), (Counts(), "calls")):
        said = [line for line in warnings_of(model, steps=3, **settings) if "not saved" in line]
        assert [line.partition(" in plain")[0] for line in said] == [f"the forward keeps {name}"]
    for other in (Keeps(uses=False), Extra(), buffered(), tiny.classifier()):
        assert not [line for line in warnings_of(other, steps=3, **settings) if "not saved" in line]
