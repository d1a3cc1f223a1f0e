"""What follows from evaluations: kept checkpoints, plateaus, early ends; and who sets the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from paceline import dist
from paceline.errors import TrainError
from paceline.testing import ranks


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).float()


class ByRank:
    """A metric that adds nothing up over the ranks, as a user's own may: every rank sees other numbers."""

    def __init__(self, numbers: dict[int, list[float]]) -> None:
        self._numbers = iter(numbers[dist.rank()])

    def to(self, device: torch.device) -> None: ...
    def reset(self) -> None: ...
    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None: ...
    def compute(self) -> float:
        return next(self._numbers)


FALLING, RISING = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@ranks(2)
def test_early_stop_is_agreed_by_ranks_that_see_different_numbers() -> None:
    metric = ByRank({0: RISING, 1: FALLING})
    trainer = tiny.classifier_trainer(
        metrics={"error": metric}, early_stop={"metric": "error", "patience": 2}, eval_every=1
    )
    history = trainer.train(tiny.blobs(), tiny.blobs(), epochs=2)
    assert len(history.steps) == 3 and "early_stop" in str(history.ended)
    assert [record["error"] for record in history.evaluations] == [1.0, 2.0, 3.0]


@ranks(2)
def test_a_plateau_cuts_alike_on_ranks_that_see_different_numbers() -> None:
    metric = ByRank({0: RISING, 1: FALLING})
    schedule = {"name": "plateau", "metric": "error", "patience": 0, "factor": 0.5}
    trainer = tiny.classifier_trainer(metrics={"error": metric}, schedule=schedule, eval_every=1)
    history = trainer.train(tiny.blobs(), tiny.blobs(), epochs=2)
    assert [record["lr"] for record in history.steps] == [1e-2, 1e-2, 5e-3, 2.5e-3, 1.25e-3, 6.25e-4]
    assert dist.all_gather_object(history.steps)[0] == history.steps


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


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def test_the_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path) -> None:
    metric = ByRank({0: [0.1, 0.9, 0.5, 0.2]})
    trainer = tiny.classifier_trainer(
        metrics={"score": metric}, save_best="score", save_every=5, keep=1, run=str(tmp_path / "r")
    )
    trainer.train(tiny.blobs(), tiny.blobs(), epochs=4)
    assert checkpoints(tmp_path / "r") == ["step-000006", "step-000012"]
    assert (tmp_path / "r" / "checkpoints" / "best").read_text() == "step-000006\n"
    assert (tmp_path / "r" / "checkpoints" / "latest").read_text() == "step-000012\n"
    best = tiny.classifier_trainer()
    best.load_checkpoint(tmp_path / "r" / "checkpoints" / "step-000006")
    assert best.step_count == 6


def test_without_save_last_only_the_best_is_kept(tmp_path: Path) -> None:
    trainer = tiny.classifier_trainer(save_best=True, save_last=False, keep=1, run=str(tmp_path / "r"))
    trainer.train(tiny.blobs(), tiny.blobs(), epochs=2)
    assert len(checkpoints(tmp_path / "r")) == 1


def test_an_unknown_metric_has_a_code_that_lists_the_known() -> None:
    trainer = tiny.classifier_trainer(metrics={"accuracy": accuracy}, save_best="acuracy")
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), tiny.blobs(), epochs=1)
    assert caught.value.code == "train.no-such-metric" and "loss, accuracy" in str(caught.value)


def test_early_stop_waits_for_its_patience() -> None:
    metric = ByRank({0: [3.0, 2.0, 2.5, 2.4, 2.3, 1.0]})
    settings: dict[str, Any] = {"metrics": {"error": metric}, "early_stop": {"metric": "error", "patience": 3}}
    history = tiny.classifier_trainer(**settings).train(tiny.blobs(), tiny.blobs(), epochs=9)
    assert len(history.evaluations) == 5


@pytest.mark.parametrize("kind", ["multistep", "sequential", "lambda", "onecycle"])
def test_a_torch_scheduler_goes_on_where_its_checkpoint_was(kind: str, tmp_path: Path) -> None:
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
    settings = {"metrics": {"score": ByRank({0: [0.1, 0.2, 0.3]})}, "schedule": {"metric": "score"}}
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, scheduler=scheduler, clip_norm=1e-3, **settings)
    trainer.train(tiny.blobs(), tiny.blobs(), epochs=3)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_step_is_saved_once_and_every_rank_hears_the_same_name(tmp_path: Path) -> None:
    @ranks(2)
    def body() -> None:
        heard: list[str] = []

        class Saves:
            def on_save(self, record: Any) -> None:
                heard.append(record.folder)

        trainer = tiny.classifier_trainer(save_every=3, run=str(tmp_path / "r"), callbacks=[Saves()])
        trainer.train(tiny.blobs(), epochs=2)
        assert [Path(folder).name for folder in heard] == ["step-000003", "step-000006"]
        assert all(Path(folder).is_dir() for folder in heard) or dist.rank() == 1

    body()
    assert checkpoints(tmp_path / "r") == ["step-000003", "step-000006"]
