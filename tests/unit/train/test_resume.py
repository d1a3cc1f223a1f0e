from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

import histories
import paceline
import positions
from histories import CASES, STEPS, Case, Tokens

COSINE, PLATEAU = CASES[:2]
DROPOUT = Case("dropout", "fp32", settings=COSINE.settings, dropout=0.1)


@given(positions.data(), positions.starts())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_every_step_holds_its_own_samples_whatever_ranks_read_them_before(
    data: positions.Data, starts: list[positions.Start]
) -> None:
    positions.check(data, starts)


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


def test_a_run_that_dies_before_its_first_checkpoint_tells_each_step_once(tmp_path: Path) -> None:
    legs = (histories.Leg("single", 4, "killed"), histories.Leg("single", STEPS))
    reference = histories.unbroken(COSINE, tmp_path)
    [told] = histories.live([histories.History(COSINE, legs)], tmp_path)
    assert [start for _, start in told.starts] == [0, 0]
    assert histories.compare(reference, told) == histories.Difference(0.0, 0.0, ())


@pytest.mark.parametrize("until", [11, 12])
def test_early_stop_counts_on_behind_a_resume(tmp_path: Path, until: int) -> None:
    run = str(tmp_path / "run")
    assert paceline.launch(_until, ranks=1, run=run, until=until)[0] == until
    # Evaluations at 3 (the first, from which nothing gets better by 10), 6, 9, 12 and 15.
    assert paceline.launch(_until, ranks=1, run=run, until=STEPS) == [15, "early_stop"]


def _until(run: str, until: int) -> list[object]:
    trainer = PLATEAU.trainer(early_stop={"patience": 4, "min_delta": 10.0}, run=run, resume="auto")
    history = trainer.train(Tokens(), Tokens(7), max_steps=until)
    return [trainer.step_count, "early_stop" if "early_stop" in history.ended else history.ended]


def test_an_evaluation_that_only_the_end_of_a_call_made_changes_nothing(tmp_path: Path) -> None:
    """Step 10 is none of an evaluation: the one that train() makes there must not cut the learning rate."""
    unbroken = PLATEAU.trainer(run=False)
    expected = unbroken.train(Tokens(), Tokens(7), max_steps=STEPS)
    first = PLATEAU.trainer(run=False)
    first.train(Tokens(), Tokens(7), max_steps=10)
    first.save_checkpoint(tmp_path / "at-10")
    second = PLATEAU.trainer(run=False)
    second.load_checkpoint(tmp_path / "at-10")
    for trainer in (first, second):
        rest = trainer.train(Tokens(), Tokens(7), max_steps=STEPS)
        assert [(r["loss"], r["lr"]) for r in rest.steps] == [(r["loss"], r["lr"]) for r in expected.steps[10:]]
