"""Methods that other frameworks' trainers have."""

from __future__ import annotations

import pytest

import paceline


def test_a_method_of_another_framework_names_ours() -> None:
    trainer = paceline.Trainer.__new__(paceline.Trainer)
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'fit'; use trainer\.train\("):
        _ = trainer.fit
    with pytest.raises(AttributeError, match=r"no attribute 'trian'$"):
        _ = trainer.trian
    assert not hasattr(trainer, "fit")
