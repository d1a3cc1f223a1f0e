from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from paceline import Loss
from paceline.errors import TrainError
from paceline.models.metric_results import read_metric, require_number, require_one_kind, weigh_metric


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
