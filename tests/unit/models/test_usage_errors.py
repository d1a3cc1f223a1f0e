"""Common mistakes with models, criteria and loss functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import ModelError, PacelineError, TrainError
from paceline.models.model_call import infer_call
from paceline.models.usage_errors import (
    Broadcasts,
    check_criterion,
    check_model,
    explain_no_gradient,
    require_trainable,
)

INPUTS, LABELS = torch.ones(4, 8), torch.tensor([0, 1, 2, 2])


class Net(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.layer, self.result = nn.Linear(8, 3), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.layer(x))


def loss_error(result: Any = lambda y: y, targets: Any = LABELS) -> Exception:
    model = Net(result)
    call = infer_call(model, (INPUTS, targets), None, nn.CrossEntropyLoss())
    with pytest.raises(Exception) as caught:
        call.loss(model, (INPUTS, targets))
    return caught.value


def notes_of(error: Exception) -> str:
    return "\n".join(error.__notes__)


@pytest.mark.parametrize(("model", "words"), [(Net, "the class Net"), ("resnet", "the str 'resnet'"), (None, "None")])
def test_a_model_is_a_module(model: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        check_model(model)
    assert caught.value.code == "model.not-a-module"
    check_model(nn.Linear(1, 1))


@pytest.mark.parametrize("function", [nn.MSELoss, "mse", lambda batch: 0, lambda model, batch, extra: 0])
def test_a_criterion_is_a_function_of_two_arguments(function: Any) -> None:
    with pytest.raises(ModelError) as caught:
        check_criterion("loss_fn", function)
    assert caught.value.code == "model.not-a-criterion"
    if callable(function) and not isinstance(function, type):
        assert "test_usage_errors.py:" in caught.value.what


@pytest.mark.parametrize("function", [None, nn.MSELoss(), lambda *args: 0, lambda a, b, c=1: 0, torch.dist, max])
def test_what_may_be_called_with_two_arguments_is_accepted(function: Any) -> None:
    check_criterion("criterion", function)


def test_a_forward_that_returns_none_is_named_with_its_line() -> None:
    error = loss_error(lambda y: None)
    assert isinstance(error, PacelineError) and error.code == "model.no-output"
    assert "forward() of Net" in error.what and "test_usage_errors.py:" in error.what


@pytest.mark.parametrize(
    ("result", "targets", "words"),
    [
        (lambda y: (y, y), LABELS, "output: tuple of 2 from"),
        (lambda y: {"logits": y}, LABELS, "return a tensor from forward()"),
        (lambda y: y, LABELS.float(), "class labels must be integers"),
        (lambda y: y, LABELS + 1, "the labels range from 1 to 3, but the output has 3 classes: 0 to 2"),
        (lambda y: y, LABELS[:, None], "class labels must have shape (batch,)"),
        (lambda y: y[:2], LABELS, "float32 tensor of shape (2, 3) from forward() of Net"),
    ],
)
def test_an_error_of_the_criterion_says_what_it_received(result: Any, targets: Any, words: str) -> None:
    assert words in notes_of(loss_error(result, targets))


def test_a_loss_without_a_graph_names_what_may_have_cut_it() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TrainError) as caught, explain_no_gradient(model):
        model(torch.ones(2)).detach().sum().backward()
    assert caught.value.code == "train.no-gradient" and "detach()" in caught.value.why
    with pytest.raises(ZeroDivisionError), explain_no_gradient(model):
        raise ZeroDivisionError


def test_a_frozen_model_has_nothing_to_train() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    for attempt in (lambda: require_trainable(model), lambda: model(torch.ones(2)).sum().backward()):
        with pytest.raises(TrainError) as caught, explain_no_gradient(model):
            attempt()
        assert caught.value.code == "train.nothing-to-train"


def found_in(loss: Any, output: tuple[int, ...], target: tuple[int, ...]) -> str | None:
    with Broadcasts(loss) as mode:
        loss(torch.zeros(output), torch.ones(target))
    return mode.found


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss()], ids=repr)
def test_a_column_and_a_vector(loss: nn.Module) -> None:
    found = found_in(loss, (8, 1), (8,))
    assert found is not None
    assert f"output (8, 1) and target (8,) broadcast to (8, 8) in {type(loss).__name__}" in found
    assert "targets.unsqueeze(-1)" in found
    assert "test_usage_errors.py" in found


def test_other_shapes_get_no_advice_about_squeezing() -> None:
    found = found_in(functional.mse_loss, (8,), (8, 1))
    assert found is not None
    assert "mse_loss" in found
    assert "make their shapes equal" in found


@pytest.mark.parametrize(
    ("output", "target"), [((8, 1), (8, 1)), ((8, 3), (1,)), ((8, 3), (8, 1)), ((8,), ())], ids=str
)
def test_a_target_that_is_repeated_is_not_reported(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    assert found_in(functional.l1_loss, output, target) is None
