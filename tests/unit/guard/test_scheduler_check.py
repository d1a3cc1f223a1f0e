from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import tiny
from paceline.errors import TrainError


class Halving:
    """Not of torch, as schedulers of other libraries are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups, self.steps = optimizer.param_groups, 0

    def step(self) -> None:
        self.steps += 1
        self.groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Timed(Halving):
    def step(self, epoch: int) -> None:  # type: ignore[override]
        """As the schedulers of timm."""


def trainer_with(make: Any, **settings: Any) -> Any:
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return tiny.classifier_trainer(model, optimizer=optimizer, scheduler=make(optimizer), clip_norm=1e-3, **settings)


def test_an_object_with_the_methods_of_a_scheduler_is_stepped_and_saved(tmp_path: Any) -> None:
    trainer = trainer_with(Halving, scheduler_interval="step")
    rates = [record["lr"] for record in trainer.train(tiny.blobs(), max_steps=3).steps]
    assert rates == [1.0, 0.5, 0.25]
    trainer.save_checkpoint(tmp_path / "saved")
    other = trainer_with(Halving, scheduler_interval="step")
    other.load_checkpoint(tmp_path / "saved")
    assert [record["lr"] for record in other.train(tiny.blobs(), max_steps=5).steps] == [0.125, 0.0625]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda optimizer: lambda step: 0.5**step, "a function without step, state_dict"),
        (lambda optimizer: lr_scheduler.StepLR, "the class StepLR"),
        (lambda optimizer: "cosine", 'schedule="cosine"'),
        (Timed, "requires the argument 'epoch'"),
    ],
    ids=["function", "class", "name", "argument"],
)
def test_what_is_no_scheduler_is_refused(make: Any, what: str) -> None:
    with pytest.raises(TrainError) as caught:
        trainer_with(make)
    assert caught.value.code == "train.not-a-scheduler" and what in str(caught.value)


def warm_up(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return min(1.0, step / num_warmup_steps)


def hugging_face(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, partial(warm_up, num_warmup_steps=3, num_training_steps=6))


MISTAKES: list[tuple[Any, str, list[str]]] = [
    (hugging_face, "epoch", ["learning rate is 0", "length of 6", "scheduler_interval='step'"]),
    (hugging_face, "step", []),
    (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=6), "epoch", ["length of 6", "scheduler_interval='step'"]),
    (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=6), "step", []),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, 6), "epoch", ["length of 6"]),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, 2), "epoch", []),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, 2), "step", ["number of epochs", "scheduler_interval='epoch'"]),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, 200), "epoch", []),
    (lambda o: lr_scheduler.LinearLR(o), "epoch", []),
]


@pytest.mark.parametrize(("make", "interval", "said"), MISTAKES)
def test_a_scheduler_that_is_stepped_in_the_other_unit_is_warned_about(
    make: Any, interval: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_with(make, scheduler_interval=interval).train(tiny.blobs(), epochs=2)
    shown = "".join(capsys.readouterr())
    assert shown.count("warning: the scheduler") == bool(said) and all(text in shown for text in said)
