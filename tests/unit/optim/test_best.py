from __future__ import annotations

import json
import math

import pytest

from paceline.optim.best import Best


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("loss", "min"),
        ("val_loss", "min"),
        ("Perplexity", "min"),
        ("error_rate", "min"),
        ("accuracy", "max"),
        ("f1", "max"),
    ],
)
def test_the_name_of_a_metric_says_which_is_better(metric: str, expected: str) -> None:
    assert Best(metric).mode == expected


def test_a_set_mode_counts_more_than_the_name() -> None:
    assert (Best("loss", "max").mode, Best("accuracy", "min").mode) == ("max", "min")


def test_the_best_is_remembered() -> None:
    best = Best("loss")
    assert [best.improved(value) for value in (3.0, 2.0, 2.0, 2.5, 1.0)] == [True, True, False, False, True]
    assert best.value == 1.0
    best = Best("accuracy")
    assert [best.improved(value) for value in (0.1, 0.05, 0.2)] == [True, False, True]


def test_a_change_has_to_be_larger_than_min_delta() -> None:
    best = Best("loss", min_delta=0.5)
    assert [best.improved(value) for value in (3.0, 2.5, 2.25, 2.0)] == [True, False, True, False]


def test_a_relative_change_works_for_negative_values() -> None:
    best = Best("loss", min_change=0.1)
    assert [best.improved(value) for value in (-10.0, -9.5, -10.5, -11.5)] == [True, False, False, True]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_never_improve(value: float) -> None:
    for metric in ("loss", "accuracy"):
        best = Best(metric)
        assert not best.improved(value)
        assert best.value is None
        assert best.improved(1.0)
        assert not best.improved(value)


def test_the_state_is_plain_and_round_trips() -> None:
    first, second = Best("loss"), Best("loss")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.value is None
    first.improved(2.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert not second.improved(2.5)
    assert second.improved(1.5)
