"""Several validation sets, and what an evaluation would fail at, which is known before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tiny
from paceline.errors import DataError, PacelineError
from worlds import ranks


class Steps:
    def __init__(self) -> None:
        self.taken = 0

    def on_step(self, step: Any) -> None:
        self.taken += 1


def train(val: Any, **settings: Any) -> tuple[str, int]:
    """The code or the class of the error, and the steps before it."""
    steps = Steps()
    trainer = tiny.classifier_trainer(callbacks=[steps], **settings)
    try:
        trainer.train(tiny.blobs(48), val, epochs=1)
    except Exception as error:
        return error.code if isinstance(error, PacelineError) else type(error).__name__, steps.taken
    return "", steps.taken


@pytest.mark.parametrize("world", [1, 2])
def test_each_set_has_its_loss_and_metrics(world: int) -> None:
    @ranks(world)
    def body() -> None:
        sets = {"easy": tiny.blobs(13), "hard": DataLoader(tiny.blobs(19, first=1), batch_size=4)}
        trainer = tiny.classifier_trainer(
            metrics=["accuracy"],
            ema=0.5,
            run="sets",
            save_best="hard/accuracy",
            early_stop={"metric": "easy/loss", "patience": 3},
        )
        history = trainer.train(tiny.blobs(48), sets, epochs=2)
        found = trainer.evaluate(sets)
        alone = {name: trainer.evaluate(data) for name, data in sets.items()}
        for name, own in alone.items():
            assert found[f"{name}/loss"] == own and found[f"{name}/accuracy"] == own["accuracy"]
        assert found == found["loss"] == (alone["easy"] + alone["hard"]) / 2
        last = history.evaluations[-1]
        assert {name: last[name] for name in found.values} == found.values and "ema_hard/accuracy" in last
        assert history.metric == "hard/accuracy" and history.mode == "max" and history.best is not None
        trainer.load_best()
        assert trainer.evaluate(sets)["hard/accuracy"] == history.best["hard/accuracy"]

    body()


def test_the_name_of_a_set_does_not_decide_what_is_better() -> None:
    """Names with `loss` or `error` in them are those of values that fall."""
    trainer = tiny.classifier_trainer(metrics=["accuracy"], save_best="errors/accuracy")
    assert trainer.train(tiny.blobs(48), {"errors": tiny.blobs(13)}, epochs=1).mode == "max"


def test_only_validation_takes_several_sets() -> None:
    sets, trainer = {"a": tiny.blobs(48), "b": tiny.blobs(13)}, tiny.classifier_trainer()
    for use in (lambda: trainer.train(sets, epochs=1), lambda: trainer.predict(sets), lambda: trainer.loader(sets)):
        with pytest.raises(DataError, match="a dict of 'a', 'b'") as caught:
            use()
        assert caught.value.code == "data.not-data" and "data['a']" in str(caught.value)


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Any:
        raise OSError("no such image")


def undefined(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
    return outputs.no_such_method()


@pytest.mark.parametrize(
    ("val", "settings", "code"),
    [
        (tiny.blobs(13), {"save_best": "acuracy"}, "train.no-such-metric"),
        (tiny.blobs(13), {"early_stop": {"metric": "ema_loss", "patience": 1}}, "train.no-such-metric"),
        ({"a": tiny.blobs(13)}, {"save_best": "accuracy", "metrics": ["accuracy"]}, "train.no-such-metric"),
        (tiny.blobs(13), {"metrics": {"mine": undefined}}, "AttributeError"),
        (tiny.blobs(13), {"metrics": ["mse"]}, "train.metric-unfit"),
        (Broken(), {}, "OSError"),
        ({"a": tiny.blobs(13), "b": Broken()}, {}, "OSError"),
        ("path/to/images", {}, "data.not-data"),
    ],
)
def test_an_evaluation_that_would_fail_is_refused_before_the_first_step(
    val: Any, settings: dict[str, Any], code: str
) -> None:
    assert train(val, **settings) == (code, 0)


@ranks(2)
def test_it_is_refused_on_all_ranks() -> None:
    assert train(tiny.blobs(13), save_best="acuracy") == ("train.no-such-metric", 0)


def test_trying_it_changes_nothing() -> None:
    """Neither the training, nor what a generator has left to give."""

    def losses(**settings: Any) -> list[float]:
        trainer = tiny.classifier_trainer(log_every=1, metrics=["accuracy"], **settings)
        return trainer.train(tiny.blobs(48), tiny.blobs(13), epochs=2).losses

    def batches() -> Iterator[Any]:
        yield from DataLoader(tiny.blobs(13), batch_size=5)

    assert losses() == losses(preflight=False)
    history = tiny.classifier_trainer().train(tiny.blobs(48), batches(), epochs=1)
    assert history.evaluations[-1]["loss"] > 0
