"""Who sets the learning rate: a schedule of the recipe or a torch scheduler of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from paceline.errors import TrainError
from worlds import ranks


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_torch_scheduler_steps_once_whatever_the_number_of_ranks(interval: str) -> None:
    @ranks(2)
    def body() -> None:
        model = tiny.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        trainer = tiny.classifier_trainer(
            model, optimizer=optimizer, scheduler=scheduler, scheduler_interval=interval, clip_norm=1e-3
        )
        history = trainer.train(tiny.blobs(), epochs=2)
        rates = [record["lr"] for record in history.steps]
        assert rates == ([1.0] * 3 + [0.5] * 3 if interval == "epoch" else [0.5**n for n in range(6)])

    body()


def test_torchs_plateau_scheduler_steps_after_each_evaluation() -> None:
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, scheduler=scheduler)
    history = trainer.train(tiny.blobs(), tiny.blobs(), epochs=3)
    assert [record["lr"] for record in history.steps[::3]] == [1e-6, 1e-6, 5e-7]


def test_a_scheduler_of_another_optimizer_has_a_code() -> None:
    model = tiny.classifier()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(second, 1)
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(model, optimizer=first, scheduler=scheduler)
    assert caught.value.code == "train.other-optimizer"
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(model, optimizer=second, scheduler=scheduler, schedule={"name": "cosine"})
    assert caught.value.code == "train.two-schedules"


def test_the_choice_of_interval_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    tiny.classifier_trainer(model, optimizer=optimizer, scheduler=scheduler, quiet=False).train(
        tiny.blobs(), max_steps=1
    )
    assert "StepLR" in (text := capsys.readouterr().out) and "once per epoch" in text


@pytest.mark.parametrize("kind", ["multistep", "sequential", "lambda", "onecycle"])
def test_a_torch_scheduler_continues_from_its_checkpoint(kind: str, tmp_path: Path) -> None:
    schedulers = torch.optim.lr_scheduler

    def make(optimizer: torch.optim.Optimizer) -> Any:
        if kind == "multistep":
            return schedulers.MultiStepLR(optimizer, [2, 4], gamma=0.5)
        if kind == "lambda":
            return schedulers.LambdaLR(optimizer, lambda step: 0.9**step)
        if kind == "onecycle":
            return schedulers.OneCycleLR(optimizer, 1.0, total_steps=20)
        parts = [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.MultiStepLR(optimizer, [1, 2], gamma=0.5)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[2])

    def trainer() -> Any:
        model = tiny.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        settings = {"optimizer": optimizer, "scheduler": make(optimizer), "scheduler_interval": "step"}
        return tiny.classifier_trainer(model, clip_norm=1e-3, **settings)

    whole = trainer().train(tiny.blobs(), max_steps=8)
    first = trainer()
    first.train(tiny.blobs(), max_steps=3)
    first.save_checkpoint(tmp_path / "c")
    second = trainer()
    second.load_checkpoint(tmp_path / "c")
    resumed = second.train(tiny.blobs(), max_steps=8)
    assert [r["lr"] for r in resumed.steps] == [r["lr"] for r in whole.steps[3:]]


def test_a_torch_plateau_scheduler_looks_at_the_named_metric() -> None:
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
    settings = {"metrics": {"score": tiny.ScriptedMetric({0: [0.1, 0.2, 0.3]})}, "schedule": {"metric": "score"}}
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, scheduler=scheduler, clip_norm=1e-3, **settings)
    trainer.train(tiny.blobs(), tiny.blobs(), epochs=3)
    assert optimizer.param_groups[0]["lr"] == 1.0


STEPS = [
    {"name": "cosine"},
    {"name": "cosine", "steps": 6},
    {"name": "step", "every": 6, "unit": "steps", "factor": 0.1},
]


@pytest.mark.parametrize("schedule", STEPS, ids=["stretched", "ended", "cut"])
def test_a_resumed_run_says_if_its_learning_rate_jumps(schedule: Any, tmp_path: Path, caplog: Any) -> None:
    def train(epochs: int, **settings: Any) -> list[float]:
        run = {"run": str(tmp_path / "run"), "resume": "auto", "schedule": schedule, **settings}
        history = tiny.classifier_trainer(**{"optimizer": {"name": "sgd", "lr": 0.5}, **run}).train(
            tiny.blobs(), epochs=epochs
        )
        return [record["lr"] for record in history.steps]

    before = train(2)
    assert len(before) == 6 and "jumps" not in caplog.text
    after = train(4)
    jumps = (
        f"[train.lr-jumps] The learning rate jumps from {before[-1]:.3g} in step 6 to {after[0]:.3g} in the next one."
    )
    assert (jumps in caplog.text, "jumps" in caplog.text) == ((True, True) if schedule is STEPS[0] else (False, False))
    caplog.clear()
    assert len(train(5, schedule={"name": "constant"}, optimizer={"name": "sgd", "lr": 0.1})) == 3
    assert "jumps" not in caplog.text  # asked for


def test_a_step_whose_scheduler_raises_is_neither_counted_nor_saved(in_folder: Path) -> None:
    """OneCycleLR steps once more than it was made for."""
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
    settings = {"optimizer": optimizer, "scheduler": scheduler, "scheduler_interval": "step", "run": "r"}
    trainer = tiny.classifier_trainer(model, **settings)
    with pytest.raises(ValueError, match="step"):
        trainer.train(tiny.blobs(), max_steps=8)
    assert trainer.step_count == 3 and not list(in_folder.glob("runs/r/checkpoints/step-*"))
