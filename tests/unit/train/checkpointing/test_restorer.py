from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import Sampler

import histories
import paceline
from histories import CASES, STEPS, Case, Tokens
from paceline.errors import CheckpointError
from resumable import Stream, points, trainer


def test_the_end_of_an_epoch_of_unknown_length_is_not_lost_after_a_save(tmp_path: Path) -> None:
    def make(**settings: Any) -> Any:
        return trainer(scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5), save_every=8, keep=None, **settings)

    whole = make(run=str(tmp_path / "a"))
    whole.train(Stream(), epochs=3)
    resumed = make(run=str(tmp_path / "b"), resume=str(tmp_path / "a" / "checkpoints" / "step-000008"))
    resumed.train(Stream(), epochs=3)
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.0125


@pytest.mark.parametrize("own_loop", [False, True])
def test_another_number_of_samples_is_refused_though_the_steps_are_as_many(tmp_path: Path, own_loop: bool) -> None:
    one, two = trainer(), trainer()
    one.train(points(60), max_steps=3)
    one.save_checkpoint(tmp_path / "c")
    two.load_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="samples was 60, now 63"):
        two.loader(points(63)) if own_loop else two.train(points(63), max_steps=5)


class OwnGenerator(Sampler[int]):
    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)

    def __iter__(self) -> Any:
        return iter(torch.randperm(64, generator=self.draw).tolist())

    def __len__(self) -> int:
        return 64


class CountsEpochs(OwnGenerator):
    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist())


@pytest.mark.parametrize("sampler", [OwnGenerator, CountsEpochs])
def test_a_stateful_sampler_resumes_where_it_was(tmp_path: Path, sampler: Any) -> None:
    def losses(stop: int | None) -> list[float]:
        one = trainer()
        if stop is not None:
            one.load_checkpoint(tmp_path / "c")
        data = torch.utils.data.DataLoader(points(), batch_size=8, sampler=sampler())
        history = one.train(data, max_steps=24)
        if stop is None and not (tmp_path / "c").exists():
            first = trainer()
            first.train(torch.utils.data.DataLoader(points(), batch_size=8, sampler=sampler()), max_steps=11)
            first.save_checkpoint(tmp_path / "c")
        return history.losses

    assert losses(None)[11:] == losses(11)


def test_recipe_changes_on_a_resume_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(run=str(tmp_path / "r"), save_every=2).train(points(), max_steps=3)
    trainer(run=str(tmp_path / "r"), resume="auto", quiet=False, clip_norm=1.0)
    said = capsys.readouterr().out
    assert "changed since this checkpoint" in said
    assert "save_every 2 → None" in said and "clip_norm None → 1.0" in said


def test_the_folder_of_a_runs_checkpoints_is_the_run(tmp_path: Path) -> None:
    trainer(run=str(tmp_path / "r")).train(points(), max_steps=3)
    resumed = trainer(run=str(tmp_path / "r"), resume=str(tmp_path / "r" / "checkpoints"))
    assert resumed.step_count == 3 and resumed.train(points(), max_steps=4).run == str(tmp_path / "r")
    with pytest.raises(CheckpointError, match="is neither a run nor a checkpoint"):
        trainer(resume=str(tmp_path))


COSINE, PLATEAU = CASES[:2]
DROPOUT = Case("dropout", "fp32", settings=COSINE.settings, dropout=0.1)


def everything(trainer: paceline.Trainer) -> dict[str, torch.Tensor]:
    with trainer.ema_weights():
        averages = {f"ema/{name}": tensor.clone() for name, tensor in trainer.state_dict().items()}
    numbers = {id(parameter): n for n, parameter in enumerate(trainer.model.parameters())}
    remembered = {
        f"optimizer/{numbers[id(parameter)]}/{key}": value
        for parameter, state in trainer.optimizer.state.items()
        for key, value in state.items()
    }
    return {**trainer.state_dict(), **averages, **remembered}


@pytest.mark.parametrize("stop", [1, 5, 13])
def test_one_process_ends_with_the_same_bits_after_a_stop(stop: int, tmp_path: Path) -> None:
    unbroken = DROPOUT.trainer(run=False)
    unbroken.train(Tokens(), max_steps=15)
    first = DROPOUT.trainer(run=False)
    first.train(Tokens(), max_steps=stop)
    first.save_checkpoint(tmp_path / "saved")
    torch.rand(3)  # what is drawn in between does not matter
    second = DROPOUT.trainer(run=False)
    second.load_checkpoint(tmp_path / "saved")
    second.train(Tokens(), max_steps=15)
    theirs, ours = everything(unbroken), everything(second)
    assert theirs.keys() == ours.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []


def test_a_run_that_dies_before_its_first_checkpoint_records_each_step_once(tmp_path: Path) -> None:
    legs = (histories.Leg("single", 4, "killed"), histories.Leg("single", STEPS))
    reference = histories.unbroken(COSINE, tmp_path)
    [told] = histories.live([histories.History(COSINE, legs)], tmp_path)
    assert [start for _, start in told.starts] == [0, 0]
    assert histories.compare(reference, told) == histories.Difference(0.0, 0.0, ())


def test_the_best_checkpoint_of_a_run_is_loaded(tmp_path: Path) -> None:
    one = trainer(run=str(tmp_path / "run"), save_best="loss", keep=None)
    one.train(points(), points(), epochs=2)
    best = (tmp_path / "run" / "checkpoints" / "best").read_text().split()[0]
    expected, other = trainer(), trainer()
    expected.load_checkpoint(tmp_path / "run" / "checkpoints" / best)
    other.load_checkpoint(tmp_path / "run" / "checkpoints" / "best")
    one.load_best(weights_only=True)
    for each in (other, one):
        assert all(map(torch.equal, each.model.state_dict().values(), expected.model.state_dict().values()))
    resumed = trainer(run=str(tmp_path / "next"), resume=str(tmp_path / "run" / "checkpoints" / "best"))
    assert resumed.train(points(), max_steps=1).steps == []


def test_without_a_best_checkpoint_there_is_a_code(tmp_path: Path) -> None:
    one = trainer(run=str(tmp_path / "run"))
    for _ in range(2):  # before and after the run folder exists
        with pytest.raises(CheckpointError) as caught:
            one.load_best()
        assert caught.value.code == "checkpoint.no-pointer"
        one.train(points(), max_steps=1)
