"""A resumed run says what differs from the one that saved the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import paceline
import tiny
from paceline.run.folder import RunFolder
from paceline.train.checks import run_setup

Schedule = Callable[[torch.optim.Optimizer], Any]


class Rows(Dataset[Any]):
    draws_randomness = False

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs.numpy()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.inputs[index]), index % 2


def trainer_of(
    folder: Path, lr: float = 0.01, schedule: Schedule | None = None, frozen: int | None = None, **settings: Any
) -> paceline.Trainer:
    model = tiny.classifier()
    if frozen is not None:
        model[frozen].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=settings.pop("decay", 0.0))
    scheduler = schedule(optimizer) if schedule else None
    kw = {"run": str(folder), "resume": "auto", "quiet": True, "scheduler_interval": "step", **settings}
    return tiny.classifier_trainer(model, optimizer=optimizer, scheduler=scheduler, **kw)


def weighted(weight: float) -> DataLoader[Any]:
    weights = torch.ones(48)
    weights[0] = weight
    return DataLoader(tiny.blobs(48), batch_size=16, sampler=WeightedRandomSampler(weights, 48))


INPUTS = tiny.blobs(48).tensors[0]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "nothing": ({}, {}, []),
    "nothing with a scheduler": (
        {"schedule": lambda o: lr_scheduler.LinearLR(o, 0.1)},
        {"schedule": lambda o: lr_scheduler.LinearLR(o, 0.1)},
        [],
    ),
    "lr": ({}, {"lr": 0.5}, ["lr is 0.5 in your optimizer, but 0.01 in the checkpoint"]),
    "decay": ({}, {"decay": 0.1}, ["weight_decay is 0.1 in your optimizer, but 0 in"]),
    "scheduler": (
        {"schedule": lambda o: lr_scheduler.ExponentialLR(o, 0.9)},
        {"schedule": lambda o: lr_scheduler.CosineAnnealingLR(o, 20)},
        ["scheduler was ExponentialLR, now CosineAnnealingLR, which continues"],
    ),
    "no scheduler": (
        {"schedule": lambda o: lr_scheduler.ExponentialLR(o, 0.9)},
        {},
        ["scheduler was ExponentialLR, now none"],
    ),
    "scheduler settings": (
        {"schedule": lambda o: lr_scheduler.StepLR(o, 2)},
        {"schedule": lambda o: lr_scheduler.StepLR(o, 3)},
        ["step_size of StepLR is 3, but 2 in the checkpoint, which is used"],
    ),
    "frozen": ({}, {"frozen": 0}, ["0.bias, 0.weight: trained before, frozen now"]),
    "unfrozen": ({"frozen": 0}, {}, ["0.bias, 0.weight: frozen before, trained now"]),
    "ema": ({"ema": 0.9}, {}, ["the averaged weights are discarded"]),
    "loss": (
        {},
        {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)},
        ["label_smoothing=0), now", "label_smoothing=0.1)"],
    ),
    "samples": ({}, {"data": TensorDataset(INPUTS * 3, tiny.blobs(48).tensors[1])}, ["as many samples, but other"]),
    "samples of a dataset": ({"data": Rows(INPUTS)}, {"data": Rows(INPUTS + 1)}, ["as many samples, but other ones"]),
    "sampler": (
        {"data": weighted(1.0), "batch": None},
        {"data": DataLoader(tiny.blobs(48), batch_size=16, shuffle=True), "batch": None},
        ["the order of samples was WeightedRandomSampler(", "now shuffled"],
    ),
    "weights of a sampler": (
        {"data": weighted(1.0), "batch": None},
        {"data": weighted(9.0), "batch": None},
        ["the order of samples was"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_says_what_differs(case: str, tmp_path: Path, capsys: Any) -> None:
    first, second, expected = CASES[case]
    for number, settings in enumerate((first, second), start=1):
        said = capsys.readouterr().out
        assert "changed since" not in said
        kw = {key: value for key, value in settings.items() if key != "data"}
        trainer_of(tmp_path / "run", **kw).train(settings.get("data", tiny.blobs(48)), max_steps=2 * number)
    said = capsys.readouterr().out
    assert ("changed since this checkpoint" in said) == bool(expected)
    assert all(text in said for text in expected), said


def test_a_recipe_that_changes_its_optimizer_is_used(tmp_path: Path) -> None:
    for number, decay in enumerate((0.1, 0.25), start=1):
        settings = {"name": "sgd", "lr": 0.1, "weight_decay": decay}
        trainer = tiny.classifier_trainer(run=str(tmp_path / "run"), resume="auto", optimizer=settings)
        trainer.train(tiny.blobs(), max_steps=2 * number)
    assert max(group["weight_decay"] for group in trainer.optimizer.param_groups) == 0.25


def test_a_checkpoint_that_is_saved_right_after_it_was_loaded_keeps_its_data_position(tmp_path: Path) -> None:
    trainer = tiny.classifier_trainer()
    trainer.train(tiny.blobs(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "one")
    again = tiny.classifier_trainer()
    again.load_checkpoint(tmp_path / "one")
    again.save_checkpoint(tmp_path / "two")
    one, two = (json.loads((tmp_path / name / "manifest.json").read_text())["data"] for name in ("one", "two"))
    assert one["batch"] == 16 and one == two


def as_script(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_setup, "main_script", lambda: path)


def trained(monkeypatch: pytest.MonkeyPatch, script: Path, **settings: Any) -> str:
    as_script(script, monkeypatch)
    trainer = tiny.classifier_trainer(resume="auto", **settings)
    return Path(str(trainer.train(tiny.blobs(), max_steps=trainer.step_count + 1).run)).name


def test_a_run_without_a_name_is_called_after_its_script_and_continued_by_it(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = in_folder / "a" / "train.py", in_folder / "b" / "train.py"
    assert trained(monkeypatch, one, run=None) == "train"
    assert trained(monkeypatch, in_folder / "other.py", run=None) == "other"
    capsys.readouterr()
    assert trained(monkeypatch, two, run=None) == "train-2"  # the run of another script is not continued
    said = capsys.readouterr().out
    assert "runs/train belongs to ../a/train.py, not to" in said and "b/train.py: it is not resumed" in said
    assert [trained(monkeypatch, script, run=None) for script in (one, two, one)] == ["train", "train-2", "train"]
    assert "belongs" not in capsys.readouterr().out
    assert trained(monkeypatch, one, run="shared") == "shared"
    assert trained(monkeypatch, two, run="shared") == "shared"  # asked for by its name
    assert "runs/shared was trained by ../a/train.py, and is now continued by" in capsys.readouterr().out


def test_the_second_model_of_a_script_has_its_class_in_the_name(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_script(in_folder / "gan.py", monkeypatch)
    names = [run_setup.default_name(model) for model in ("generator", "critic", "generator", "critic")]
    assert names == ["gan", "gan-critic", "gan", "gan-critic"]


def test_a_run_of_an_unknown_script_is_continued(in_folder: Path) -> None:
    folder = RunFolder.create("train")
    folder.config.touch()
    assert run_setup.find("train", in_folder / "train.py") == (folder, None)
    for damaged in ("", "[]", json.dumps({"script": 3})):
        folder.derived.write_text(damaged)
        assert run_setup.find("train", in_folder / "train.py") == (folder, None)


def test_tests_and_notebooks_have_no_script() -> None:
    assert run_setup.main_script() is None and run_setup.default_name("linear") == "linear"
