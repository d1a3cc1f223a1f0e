"""Arguments of the Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ConfigError, PacelineError
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


def test_a_method_of_another_framework_names_ours() -> None:
    trainer = paceline.Trainer.__new__(paceline.Trainer)
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'fit'; use trainer\.train\("):
        _ = trainer.fit
    with pytest.raises(AttributeError, match=r"no attribute 'trian'$"):
        _ = trainer.trian
    assert not hasattr(trainer, "fit")


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("max_epochs", "use epochs=3"),
        ("epoch", "use epochs=3"),
        ("batch_size", "use `batch`"),
        ("batch", "pass it to the Trainer: Trainer(…, batch=3)"),
        ("epcohs", "did you mean 'epochs'?"),
    ],
)
def test_an_argument_of_another_framework_names_ours(argument: str, fix: str) -> None:
    trainer = paceline.Trainer.__new__(paceline.Trainer)
    with pytest.raises(ConfigError) as caught:
        trainer.train([], **{argument: 3})
    assert caught.value.code == "config.unknown-key" and caught.value.fix.startswith(fix)
