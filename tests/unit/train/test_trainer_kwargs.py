"""Arguments of the Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.train.trainer_kwargs import check_arguments

MODEL = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("position", "value", "code"),
    [
        (0, nn.Linear, "model.not-a-module"),
        (1, torch.optim.SGD, "train.not-an-optimizer"),
        (2, lambda batch: 0, "model.not-a-criterion"),
        (3, nn.MSELoss, "model.not-a-criterion"),
        (4, 3, "train.not-a-scheduler"),
    ],
)
def test_an_unusable_object_is_refused_before_anything_is_built(position: int, value: Any, code: str) -> None:
    arguments: list[Any] = [MODEL, None, None, None, None]
    check_arguments(*arguments)
    arguments[position] = value
    with pytest.raises(PacelineError) as caught:
        check_arguments(*arguments)
    assert caught.value.code == code
