from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from paceline import Loss
from paceline.errors import TrainError
from paceline.models.model_call import infer_call, read_loss


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return ("one", x)


class Two(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return ("two", x, y)


class Optional(nn.Module):
    def forward(self, x: Any, y: Any = None) -> Any:
        return ("optional", x, y)


class WithTargets(nn.Module):
    def forward(self, x: Any, targets: Any = None) -> Any:
        return "targets", x, targets


def test_keys_that_forward_does_not_have_are_named() -> None:
    model, batch = nn.Linear(2, 2), {"images": torch.ones(1, 2), "labels": torch.ones(1, 2)}
    with pytest.raises(TypeError) as caught:
        infer_call(model, batch, None, None).loss(model, batch)
    assert "Name the keys (images, labels) like the parameters of forward() (input)" in caught.value.__notes__[0]


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
        (WithTargets(), [3, 4], ("targets", 3, 4)),
    ],
)
def test_a_batch_reaches_the_model_by_the_rule(model: nn.Module, batch: Any, expected: Any) -> None:
    call = infer_call(model, batch, None, None)
    assert call.loss(model, batch) == expected
    assert call.rule.startswith("model(")


@pytest.mark.parametrize(("model", "batch"), [(Optional(), (3, 4)), (Two(), {"x": 3, "z": 4})])
def test_a_batch_that_could_be_meant_two_ways_has_a_code(model: nn.Module, batch: Any) -> None:
    with pytest.raises(TrainError) as caught:
        infer_call(model, batch, None, None)
    assert caught.value.code == "train.ambiguous-batch"


def test_loss_fn_and_criterion_go_first() -> None:
    call = infer_call(Optional(), (3, 4), lambda model, batch: ("mine", batch), None)
    assert call.loss(Optional(), (3, 4)) == ("mine", (3, 4))
    call = infer_call(One(), (3, 4), None, lambda output, target: (output, target))
    assert call.loss(One(), (3, 4)) == (("one", 3), 4)
    with pytest.raises(TrainError) as caught:
        infer_call(One(), 3, None, nn.MSELoss())
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
def test_an_invalid_loss_has_a_code(result: Any) -> None:
    with pytest.raises(TrainError) as caught:
        read_loss(result)
    assert caught.value.code == "train.no-loss"


@pytest.mark.parametrize(
    ("name", "config", "first"),
    [
        ("GPT2LMHeadModel", {"model_type": "gpt2"}, 1),
        ("LlamaForCausalLM", {"model_type": "llama"}, 1),
        ("LlavaForConditionalGeneration", {"model_type": "llava"}, 1),
        ("BertForMaskedLM", {"model_type": "bert"}, 0),
        ("BertForTokenClassification", {"model_type": "bert"}, 0),
        ("T5ForConditionalGeneration", {"model_type": "t5", "is_encoder_decoder": True}, 0),
        ("MarianMTModel", {"model_type": "marian", "is_encoder_decoder": True}, 0),
        ("XLMWithLMHeadModel", {"model_type": "xlm"}, 0),
        ("BertForSequenceClassification", {"model_type": "bert"}, None),
    ],
)
def test_a_hugging_face_models_labels_count_as_it_counts_them(
    name: str, config: dict[str, Any], first: int | None
) -> None:
    """Their loss is a mean over the labels that are not -100, the first of which some models leave out."""

    def forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(loss=torch.tensor(2.0))

    model = type(name, (nn.Module,), {"forward": forward})()
    model.config = SimpleNamespace(**config)
    model._compiled_call_impl = model._call_impl  # a compiled graph does not show what its loss was divided by
    labels = torch.tensor([[5, 6, -100], [7, -100, -100]])
    batch = {"input_ids": labels, "labels": labels}
    value, weight, _ = read_loss(infer_call(model, batch, None, None).loss(model, batch))
    counted = None if first is None else int((labels[:, first:] != -100).sum())
    assert (None if weight is None else int(weight)) == counted
    assert value == 2.0 * (counted or 1)


def test_labels_of_length_one_leave_nothing_to_predict() -> None:
    token = torch.tensor([[3]])
    with pytest.raises(TrainError, match=r"train\.no-labels-left"):
        infer_call(tiny.tiny_hf_gpt2(), {"input_ids": token, "labels": token}, None, None)
