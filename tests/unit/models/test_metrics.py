from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline import Loss
from paceline.config.components import METRICS
from paceline.errors import TrainError
from paceline.models.gpt import GPT
from paceline.models.metrics import NamedMetric, read_metric, require_number, require_one_kind, weigh_metric


def find(name: str) -> NamedMetric:
    metric: Any = METRICS.find(name)
    return metric


def value(name: str, outputs: Any, targets: Any, **of: Any) -> float:
    metric = find(name).for_model(of.get("model", nn.Identity()), of.get("criterion"))
    total, weight = metric(outputs, targets)
    return metric.finish(float(total) / float(weight))


def draw(*shape: int, classes: int = 7) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return torch.randn(*shape, classes, generator=random), torch.randint(classes, shape, generator=random)


@pytest.mark.parametrize("shape", [(11,), (5, 4)])
def test_classification_metrics_are_those_of_torch(shape: tuple[int, ...]) -> None:
    outputs, targets = draw(*shape)
    in_top5 = (outputs.topk(5).indices == targets[..., None]).any(-1)
    assert value("accuracy", outputs, targets) == (outputs.argmax(-1) == targets).double().mean()
    assert value("top5_accuracy", outputs, targets) == in_top5.double().mean()
    mean = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    assert value("perplexity", outputs, targets) == pytest.approx(mean.exp().item())


def test_classes_may_be_the_second_dim_as_in_torchs_cross_entropy() -> None:
    outputs, targets = draw(5, 4, 6)
    second = outputs.movedim(-1, 1)
    assert value("accuracy", second, targets) == value("accuracy", outputs, targets)
    mean = functional.cross_entropy(second, targets)
    assert value("perplexity", second, targets) == pytest.approx(mean.exp().item())


def test_errors_of_values_are_those_of_torch() -> None:
    random = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(5, 3, generator=random), torch.randn(5, 3, generator=random)
    mean = functional.mse_loss(outputs, targets).item()
    assert value("mse", outputs, targets) == pytest.approx(mean)
    assert value("rmse", outputs, targets) == pytest.approx(math.sqrt(mean))
    assert value("mae", outputs, targets) == pytest.approx(functional.l1_loss(outputs, targets).item())


def test_ignored_targets_are_not_counted() -> None:
    outputs, targets = draw(5, 4)
    padded = targets.clone()
    padded[2:, 1:] = -100
    counted = padded != -100
    for name in ("accuracy", "perplexity"):
        wanted = pytest.approx(value(name, outputs[counted], targets[counted]))
        assert value(name, outputs, padded) == wanted
        other = torch.where(counted, targets, 3)
        of_criterion = value(name, outputs, other, criterion=nn.CrossEntropyLoss(ignore_index=3))
        kept = other != 3
        assert of_criterion == pytest.approx(value(name, outputs[kept], other[kept]))


def test_labels_that_the_model_shifts_are_shifted() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=13, n_positions=8, n_embd=8, n_layer=1, n_head=1)).eval()
    tokens = torch.randint(13, (3, 8), generator=torch.Generator().manual_seed(0))
    labels = torch.where(tokens == 2, -100, tokens)
    with torch.no_grad():
        result = model(tokens, labels=labels)
    assert value("perplexity", result.logits, labels, model=model) == pytest.approx(result.loss.exp().item(), rel=1e-5)
    hits = (result.logits[:, :-1].argmax(-1) == labels[:, 1:])[labels[:, 1:] != -100]
    assert value("accuracy", result.logits, labels, model=model) == hits.double().mean()


@pytest.mark.parametrize("name", ["accuracy", "top5_accuracy", "perplexity"])
def test_with_as_many_tokens_as_classes_the_model_or_the_criterion_tells_which_dim_has_the_classes(name: str) -> None:
    from transformers import BertConfig, BertForTokenClassification, GPT2Config, GPT2LMHeadModel

    outputs, targets = draw(5, 7)
    wanted = value(name, outputs.flatten(0, 1), targets.flatten())
    sizes: Any = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    bert = BertForTokenClassification(BertConfig(**sizes, intermediate_size=8, num_labels=7))
    for model in (GPT(1, 8, 2, 7, 7), bert):
        assert value(name, outputs, targets, model=model) == pytest.approx(wanted)
    for criterion in (nn.CrossEntropyLoss(), functional.cross_entropy):
        assert value(name, outputs.movedim(-1, 1), targets, criterion=criterion) == pytest.approx(wanted)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=7, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    labels = nn.functional.pad(targets, (1, 0))
    assert value(name, nn.functional.pad(outputs, (0, 0, 0, 1)), labels, model=gpt2) == pytest.approx(wanted)


def test_a_batch_whose_shapes_tell_does_so_for_those_whose_shapes_do_not() -> None:
    for dim in (-1, 1):
        metric = find("accuracy").for_model(nn.Identity(), None)
        for tokens in (4, 7):
            outputs, targets = draw(5, tokens)
            assert metric(outputs.movedim(-1, dim), targets) == find("accuracy")(outputs[None], targets[None])


def test_a_perplexity_beyond_the_range_of_floats_is_infinite() -> None:
    assert find("perplexity").finish(1000.0) == math.inf


LOGITS, CLASSES = draw(6)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "words"),
    [
        ("accuracy", LOGITS, CLASSES.float(), "not classes"),
        ("accuracy", LOGITS.argmax(-1), CLASSES, "not logits"),
        ("accuracy", LOGITS, CLASSES[:, None], r"\(6, 7\), targets \(6, 1\)"),
        ("accuracy", LOGITS[:, :1], CLASSES * 0, "one logit for each target"),
        ("accuracy", torch.zeros(2, 5, 5), torch.zeros(2, 5).long(), "second or the last"),
        ("perplexity", {"a": LOGITS}, CLASSES, "the outputs are a dict"),
        ("perplexity", LOGITS, [1, 2], "the targets are a list"),
        ("top5_accuracy", LOGITS[:, :4], CLASSES % 4, "only 4 classes"),
        ("mse", torch.zeros(6, 1), torch.zeros(6), r"\(6, 1\), targets \(6,\)"),
        ("mae", torch.zeros(6), torch.zeros(6).long(), "the targets int64"),
    ],
)
def test_outputs_that_do_not_fit_a_metric_are_refused(name: str, outputs: Any, targets: Any, words: str) -> None:
    with pytest.raises(TrainError, match=words) as caught:
        value(name, outputs, targets)
    assert caught.value.code == "train.metric-unfit" and f"'{name}'" in caught.value.what


@pytest.mark.parametrize(
    ("result", "kind", "total", "weight"),
    [
        (torch.tensor([1, 0, 1]), "a tensor of values", 2, 3),
        (torch.ones(3, 5, dtype=torch.bfloat16), "a tensor of values", 15, 15),  # per token
        (torch.ones(7, dtype=torch.bool), "a tensor of values", 7, 7),  # of the tokens that count
        (torch.ones(0), "a tensor of values", 0, 0),
        (numpy.array([0.5, 0.25, 0.25]), "a tensor of values", 1, 3),
        ([1.0, 2.0, 3.0], "a tensor of values", 6, 3),
        (Loss(torch.tensor(6.0), 4), "a Loss", 6, 4),
        (torch.tensor(0.5), "a number", 0.5, 1),
        (numpy.float32(0.5), "a number", 0.5, 1),
        (2, "a number", 2, 1),
        (torch.tensor([0.5]), None, 0.5, 1),  # the only token that counts, or a mean with keepdim
    ],
)
def test_results_of_a_batch_of_three_samples(result: Any, kind: str | None, total: float, weight: float) -> None:
    [(name, read)] = read_metric("mine", result, 3)
    assert (name, read.kind, float(read.sum), float(read.weight)) == ("mine", kind, total, weight)


def test_a_number_for_one_sample_may_be_its_value() -> None:
    [(_, read)] = read_metric("mine", torch.tensor(0.5), 1)
    assert read.kind is None


@pytest.mark.parametrize("result", [(1.0, 3), [1.0, 3], None, "0.5", torch.ones(3, dtype=torch.complex64), {"a": {}}])
def test_other_results_are_refused_by_name(result: Any) -> None:
    with pytest.raises(TrainError, match="'mine") as caught:
        list(read_metric("mine", result, 3))
    assert caught.value.code == "train.metric-result"


def test_kinds_must_agree() -> None:
    assert require_one_kind("mine", []) == "a number" and require_one_kind("mine", ["a Loss"]) == "a Loss"
    with pytest.raises(TrainError, match="a Loss for one batch and a number for another"):
        require_one_kind("mine", ["a Loss", "a number"])


def test_a_metric_next_to_the_loss_has_its_weight_unless_it_brings_its_own() -> None:
    assert weigh_metric("mine", 0.5, 4) == (2.0, 4)
    assert weigh_metric("mine", Loss(torch.tensor(6.0), 3), 4) == (6.0, 3)
    for bad in (torch.ones(2), "high", None, {}):
        with pytest.raises(TrainError) as caught:
            require_number("mine", bad)
        assert caught.value.code == "train.not-a-number"
