"""Methods that other frameworks' trainers have."""

from __future__ import annotations

import pytest

import paceline
from paceline.errors import ConfigError


def test_a_method_of_another_framework_names_ours() -> None:
    trainer = paceline.Trainer.__new__(paceline.Trainer)
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'fit'; use trainer\.train\("):
        _ = trainer.fit
    with pytest.raises(AttributeError, match=r"no attribute 'trian'$"):
        _ = trainer.trian
    assert not hasattr(trainer, "fit")


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("max_epochs", "use epochs=3"),
        ("epoch", "use epochs=3"),
        ("batch_size", "use `batch`"),
        ("batch", "pass it to the Trainer: Trainer(…, batch=3)"),
        ("epcohs", "did you mean 'epochs'?"),
    ],
)
def test_an_argument_of_another_framework_names_ours(argument: str, fix: str) -> None:
    trainer = paceline.Trainer.__new__(paceline.Trainer)
    with pytest.raises(ConfigError) as caught:
        trainer.train([], **{argument: 3})
    assert caught.value.code == "config.unknown-key" and caught.value.fix.startswith(fix)
