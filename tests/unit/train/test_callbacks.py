"""Callbacks: few hooks, small records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from paceline.errors import TrainError
from paceline.train.callbacks import HOOKS


class Listener:
    """Has all the hooks, and remembers what came."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name not in HOOKS:
            raise AttributeError(name)
        return lambda record: self.heard.append((name, record))

    def __dir__(self) -> list[str]:
        return list(HOOKS)

    def of(self, hook: str) -> list[Any]:
        return [record for name, record in self.heard if name == hook]


def test_there_are_at_most_nine_hooks() -> None:
    assert len(HOOKS) <= 9


def test_hooks_come_in_order_with_their_records(tmp_path: Path) -> None:
    listener = Listener()
    trainer = tiny.classifier_trainer(callbacks=[listener], log_every=2, run=str(tmp_path / "r"))
    history = trainer.train(tiny.blobs(), tiny.blobs(), epochs=2)
    names = [name for name, _ in listener.heard]
    step = ["on_gradients", "on_step"]
    epoch = [*step, *step, "on_log", *step, "on_epoch", "on_log", "on_evaluate"]
    again = [*step, "on_log", *step, *step, "on_log", "on_epoch", "on_evaluate"]
    assert names == ["on_start", *epoch, *again, "on_save", "on_end"]
    assert [record["loss"] for record in listener.of("on_log")] == [history.losses[i] for i in (1, 2, 3, 5)]
    assert listener.of("on_evaluate") == history.evaluations
    assert [record.epoch for record in listener.of("on_epoch")] == [0, 1]
    assert listener.of("on_end")[0].step == 6 and listener.of("on_start")[0].run == history.run
    assert Path(listener.of("on_save")[0].folder).is_dir()


def test_a_steps_loss_is_a_tensor_equal_to_the_recorded_one() -> None:
    listener = Listener()
    for accumulate in (1, 3):
        listener.heard.clear()
        history = tiny.classifier_trainer(callbacks=[listener], accumulate=accumulate).train(tiny.blobs(), epochs=1)
        losses = [record.loss for record in listener.of("on_step")]
        assert all(isinstance(loss, torch.Tensor) for loss in losses)
        assert [loss.item() for loss in losses] == pytest.approx(history.losses, rel=1e-6)


def test_a_function_is_an_on_step() -> None:
    steps: list[int] = []
    tiny.classifier_trainer(callbacks=[lambda record: steps.append(record.step)]).train(tiny.blobs(), max_steps=3)
    assert steps == [1, 2, 3]


def test_an_error_passes_the_hooks_and_what_was_pending_is_written(tmp_path: Path) -> None:
    listener = Listener()

    def break_at_four(record: Any) -> None:
        if record.step == 4:
            raise KeyError("on purpose")

    trainer = tiny.classifier_trainer(callbacks=[break_at_four, listener], log_every=100, run=str(tmp_path / "r"))
    with pytest.raises(KeyError):
        trainer.train(tiny.blobs(), epochs=9)
    assert isinstance(listener.of("on_error")[0].error, KeyError)
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) == 4


def test_stop_ends_training_at_the_next_log_point() -> None:
    trainer = tiny.classifier_trainer(
        callbacks=[lambda record: trainer.stop() if record.step == 5 else None], log_every=4
    )
    history = trainer.train(tiny.blobs(), epochs=100)
    assert len(history.steps) == 8 and history.ended == "trainer.stop()"


class Misspelt:
    def on_evaluation(self, record: Any) -> None: ...


def test_a_misspelt_hook_has_a_code_and_the_right_spelling() -> None:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(callbacks=[Misspelt()])
    assert caught.value.code == "train.unknown-hook" and "on_evaluate" in str(caught.value)


@pytest.mark.parametrize("callback", [object(), Listener])
def test_a_callback_without_hooks_has_a_code(callback: Any) -> None:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(callbacks=[callback])
    assert caught.value.code == "train.no-hook"
