"""Every declared pass has a function, and the other way round."""

from __future__ import annotations

from paceline.parallel.parallelize import APPLY
from paceline.plan.passes import PASSES


def test_every_pass_is_implemented() -> None:
    assert list(APPLY) == [each.name for each in PASSES]


def test_passes_on_the_step_follow_those_on_the_model() -> None:
    targets = [each.target for each in PASSES]
    assert targets == sorted(targets)  # "model" before "step"
