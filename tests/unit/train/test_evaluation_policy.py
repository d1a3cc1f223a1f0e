from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from histories import CASES, STEPS, Tokens

COSINE, PLATEAU = CASES[:2]


@pytest.mark.parametrize("until", [11, 12])
def test_a_resumed_run_keeps_the_count_of_early_stop(tmp_path: Path, until: int) -> None:
    run = str(tmp_path / "run")
    assert paceline.launch(_until, ranks=1, run=run, until=until)[0] == until
    # Evaluations at 3 (the first, from which nothing gets better by 10), 6, 9, 12 and 15.
    assert paceline.launch(_until, ranks=1, run=run, until=STEPS) == [15, "early_stop"]


def _until(run: str, until: int) -> list[object]:
    trainer = PLATEAU.trainer(early_stop={"patience": 4, "min_delta": 10.0}, run=run, resume="auto")
    history = trainer.train(Tokens(), Tokens(7), max_steps=until)
    return [trainer.step_count, "early_stop" if "early_stop" in history.ended else history.ended]


def test_an_evaluation_that_is_not_due_does_not_change_the_learning_rate(tmp_path: Path) -> None:
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
