from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
import tiny
from histories import CASES, STEPS, Tokens
from paceline import dist
from paceline.errors import TrainError
from worlds import ranks

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


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).float()


FALLING, RISING = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@ranks(2)
def test_early_stop_is_agreed_by_ranks_that_see_different_numbers() -> None:
    metric = tiny.ScriptedMetric({0: RISING, 1: FALLING})
    trainer = tiny.classifier_trainer(
        metrics={"error": metric}, early_stop={"metric": "error", "patience": 2}, eval_every=1
    )
    history = trainer.train(tiny.blobs(), tiny.blobs(), epochs=2)
    assert len(history.steps) == 3 and "early_stop" in str(history.ended)
    assert [record["error"] for record in history.evaluations] == [1.0, 2.0, 3.0]


@ranks(2)
def test_a_plateau_lowers_the_rate_alike_on_ranks_that_see_different_numbers() -> None:
    metric = tiny.ScriptedMetric({0: RISING, 1: FALLING})
    schedule = {"name": "plateau", "metric": "error", "patience": 0, "factor": 0.5}
    trainer = tiny.classifier_trainer(metrics={"error": metric}, schedule=schedule, eval_every=1)
    history = trainer.train(tiny.blobs(), tiny.blobs(), epochs=2)
    assert [record["lr"] for record in history.steps] == [1e-2, 1e-2, 5e-3, 2.5e-3, 1.25e-3, 6.25e-4]
    assert dist.all_gather_object(history.steps)[0] == history.steps


def test_an_unknown_metric_has_a_code_that_lists_the_known() -> None:
    trainer = tiny.classifier_trainer(metrics={"accuracy": accuracy}, save_best="acuracy")
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), tiny.blobs(), epochs=1)
    assert caught.value.code == "train.no-such-metric" and "loss, accuracy" in str(caught.value)


def test_early_stop_waits_for_its_patience() -> None:
    metric = tiny.ScriptedMetric({0: [3.0, 2.0, 2.5, 2.4, 2.3, 1.0]})
    settings: dict[str, Any] = {"metrics": {"error": metric}, "early_stop": {"metric": "error", "patience": 3}}
    history = tiny.classifier_trainer(**settings).train(tiny.blobs(), tiny.blobs(), epochs=9)
    assert len(history.evaluations) == 5
