from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Loss
from paceline.errors import TrainError
from paceline.train.calling import choose_call, read_loss


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return ("one", x)


class Two(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return ("two", x, y)


class Optional(nn.Module):
    def forward(self, x: Any, y: Any = None) -> Any:
        return ("optional", x, y)


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (One(), 3, ("one", 3)),
        (One(), (3,), ("one", 3)),
        (One(), (3, 4), ("one", (3, 4))),
        (Two(), [3, 4], ("two", 3, 4)),
        (Optional(), {"x": 3, "y": 4}, ("optional", 3, 4)),
        (Optional(), {"y": 4, "x": 3}, ("optional", 3, 4)),
        (One(), {"a": 3}, ("one", {"a": 3})),
    ],
)
def test_a_batch_reaches_the_model_by_the_rule(model: nn.Module, batch: Any, expected: Any) -> None:
    call = choose_call(model, batch, None, None)
    assert call.loss(model, batch) == expected
    assert call.rule.startswith("model(")


@pytest.mark.parametrize(("model", "batch"), [(Optional(), (3, 4)), (Two(), {"x": 3, "z": 4})])
def test_a_batch_that_could_be_meant_two_ways_has_a_code(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TrainError) as caught:
        choose_call(model, batch, None, None)
    assert caught.value.code == "train.ambiguous-batch"


def test_loss_fn_and_criterion_go_first() -> None:
    call = choose_call(Optional(), (3, 4), lambda model, batch: ("mine", batch), None)
    assert call.loss(Optional(), (3, 4)) == ("mine", (3, 4))
    call = choose_call(One(), (3, 4), None, lambda output, target: (output, target))
    assert call.loss(One(), (3, 4)) == (("one", 3), 4)
    with pytest.raises(TrainError) as caught:
        choose_call(One(), 3, None, nn.MSELoss())
    assert caught.value.code == "train.no-pair"


def test_losses_are_read_in_every_form() -> None:
    scalar = torch.tensor(2.0)
    assert read_loss(scalar)[:2] == (scalar, None)
    assert read_loss({"loss": scalar})[:2] == (scalar, None)
    assert read_loss(SimpleNamespace(loss=scalar))[:2] == (scalar, None)
    assert read_loss(Loss(scalar, 3.0))[:2] == (scalar, 3.0)
    assert read_loss({"loss": Loss(scalar, 3.0)})[:2] == (scalar, 3.0)
    assert read_loss(torch.tensor([2.0]))[0].shape == ()


@pytest.mark.parametrize("result", [torch.ones(3), {"logits": 3}, None, 3.0])
def test_what_is_no_loss_has_a_code(result: Any) -> None:
    with pytest.raises(TrainError) as caught:
        read_loss(result)
    assert caught.value.code == "train.no-loss"
