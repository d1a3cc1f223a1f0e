from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.train.first_step import candidates, select


def parameters(*megabytes: float) -> list[Tensor]:
    return [nn.Parameter(torch.empty(int(each * 2**18), device="meta")) for each in megabytes]


def test_sizes_that_give_the_same_number_of_buckets_are_tried_once() -> None:
    assert candidates(parameters(0.5)) == [1]
    assert candidates(parameters(*[0.5] * 30)) == [1, 5, 25]
    assert candidates(parameters(*[2.0] * 100)) == [1, 5, 25, 100]
    assert candidates(parameters(30.0, 30.0)) == [1, 100]  # none is divided


def test_frozen_parameters_have_no_bucket() -> None:
    frozen = parameters(*[2.0] * 100)
    for each in frozen:
        each.requires_grad_(False)
    assert candidates([*frozen, *parameters(0.5)]) == [1]


def test_the_fastest_size_is_selected_unless_the_default_is_as_fast() -> None:
    assert select({1: 0.30, 5: 0.20, 25: 0.21}) == 5
    assert select({1: 0.200, 5: 0.201, 25: 0.202}) == 25
    assert select({1: 0.200, 5: 0.201, 25: 0.210}) == 5
