"""Ranks that call different methods of the Trainer: each is named with its line, long before a timeout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nodes
import paceline
import tiny
from faults import worlds
from paceline import Trainer, dist
from paceline.diagnose.hang.barrier import Verdict
from paceline.errors import PacelineError

TIMEOUT = 600.0  # of collectives: longer than a test may take


def trainer_of(strategy: str, **settings: Any) -> Trainer:
    return tiny.classifier_trainer(strategy=strategy, batch=16, timeout=TIMEOUT, **settings)


def after_an_epoch(strategy: str) -> None:
    trainer = trainer_of(strategy)
    for _ in range(2):
        for batch in trainer.loader(tiny.blobs()):
            trainer.training_step(batch)
        if trainer.is_main_process:
            trainer.evaluate(tiny.blobs())


def in_an_epoch(strategy: str) -> None:
    trainer = trainer_of(strategy)
    for number, batch in enumerate(trainer.loader(tiny.blobs())):
        trainer.training_step(batch)
        if trainer.is_main_process and number == 1:
            trainer.evaluate(tiny.blobs())


def in_a_callback(strategy: str) -> None:
    class Evaluates:
        def on_epoch(self, record: Any) -> None:
            if dist.is_main():
                trainer.evaluate(tiny.blobs())

    trainer = trainer_of(strategy, callbacks=[Evaluates()])
    trainer.train(tiny.blobs(), epochs=2)


def before_a_barrier(strategy: str) -> None:
    trainer = trainer_of(strategy)
    trainer.train(tiny.blobs(), epochs=1)
    if trainer.is_main_process:
        trainer.predict(tiny.blobs())
    dist.barrier()


@pytest.mark.parametrize(
    ("body", "strategy", "called", "elsewhere"),
    [
        (after_an_epoch, "ddp", "evaluate", "trainer.loader() at"),
        (in_an_epoch, "fsdp", "evaluate", "trainer.training_step() at"),
        (in_a_callback, "ddp", "evaluate", "trainer.train() at"),
        (before_a_barrier, "fsdp", "predict", "dist.barrier() at"),
    ],
)
def test_the_call_of_one_rank_is_named(body: Callable[[str], None], strategy: str, called: str, elsewhere: str) -> None:
    ended = worlds.run(2, lambda: body(strategy))
    assert ended[0].code == "world.different-calls"
    assert f"rank 0: trainer.{called}() at test_different_calls.py:" in ended[0].error
    assert f"rank 1: {elsewhere} test_different_calls.py:" in ended[0].error
    assert "if trainer.is_main_process" in ended[0].error


def test_a_rank_that_has_ended_its_script_is_named() -> None:
    def body() -> None:
        trainer = trainer_of("ddp")
        trainer.train(tiny.blobs(), epochs=1)
        if trainer.is_main_process:
            trainer.evaluate(tiny.blobs())

    with pytest.raises(PacelineError) as caught:
        paceline.launch(body, ranks=2)
    assert caught.value.code == "world.different-calls"
    assert "rank 1: has ended" in str(caught.value)


def test_a_rank_with_fewer_batches_is_named() -> None:
    def body() -> None:
        trainer = trainer_of("ddp")
        batches = [tiny.blobs()[start : start + 4] for start in range(dist.rank() * 20, dist.rank() * 20 + 20, 4)]
        for batch in batches[: 3 + dist.rank()]:
            trainer.training_step(batch)
        trainer.evaluate(tiny.blobs())

    ended = worlds.run(2, body)
    assert ended[0].code == "world.different-calls"
    assert "rank 1: trainer.training_step() at" in ended[0].error
    assert "the same number of steps" in ended[0].error


def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """It comes after more looks at it than it takes to report a rank that will not come."""
    looks, look = [], Verdict.look

    def counted(*arguments: Any) -> Any:
        looks.append(look(*arguments))
        if len(looks) > 10:
            (tmp_path / "looked").touch()
        return looks[-1]

    def body() -> float:
        Verdict.look = counted  # type: ignore[method-assign]
        trainer = trainer_of("ddp")
        trainer.train(tiny.blobs(), epochs=1)
        if not trainer.is_main_process:
            nodes.eventually((tmp_path / "looked").exists)
        return float(trainer.evaluate(tiny.blobs()))

    first, second = worlds.values(2, body)
    assert first == second
