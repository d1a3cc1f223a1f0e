from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch

from paceline.config.recipe import Config
from paceline.optim.schedules import Best, Plateau, Schedule, from_plan
from paceline.plan.schedule import derive_schedule


def schedule(steps_per_epoch: int | None = 10, epochs: int = 10, **settings: Any) -> Schedule:
    config = Config.from_dict({"schedule": settings})
    return from_plan(config.schedule, derive_schedule(config, 8, steps_per_epoch, epochs, None))


def rates(kind: Any, count: int, **options: Any) -> list[float]:
    """What one of torch's schedulers gives for a highest rate of 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = kind(optimizer, **options)
    values = []
    for _ in range(count):
        values.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return values


def factors(of: Schedule, count: int) -> list[float]:
    return [of.factor(step) for step in range(count)]


def test_constant_stays() -> None:
    assert set(factors(schedule(name="constant"), 120)) == {1.0}


def test_cosine_is_torchs() -> None:
    expected = rates(torch.optim.lr_scheduler.CosineAnnealingLR, 101, T_max=100, eta_min=0.1)
    assert factors(schedule(name="cosine", floor=0.1), 101) == pytest.approx(expected)


def test_linear_is_torchs() -> None:
    expected = rates(torch.optim.lr_scheduler.LinearLR, 120, start_factor=1.0, end_factor=0.2, total_iters=100)
    assert factors(schedule(name="linear", floor=0.2), 120) == pytest.approx(expected)


def test_step_is_torchs() -> None:
    every = rates(torch.optim.lr_scheduler.StepLR, 100, step_size=30, gamma=0.5)
    assert factors(schedule(name="step", every=30, factor=0.5), 100) == pytest.approx(every)
    at = rates(torch.optim.lr_scheduler.MultiStepLR, 100, milestones=[30, 45], gamma=0.1)
    assert factors(schedule(name="step", at=[45, 30]), 100) == pytest.approx(at)


def test_step_does_not_fall_below_the_floor() -> None:
    assert schedule(name="step", every=10, floor=0.05).factor(99) == 0.05


def test_epochs_are_converted_to_steps() -> None:
    assert factors(schedule(name="step", unit="epochs", at=[3, 6]), 100) == factors(
        schedule(name="step", at=[30, 60]), 100
    )
    assert factors(schedule(name="step", unit="epochs", every=2, warmup=1), 100) == factors(
        schedule(name="step", every=20, warmup=10), 100
    )
    assert factors(schedule(name="cosine", unit="epochs", steps=4), 100) == factors(
        schedule(name="cosine", steps=40), 100
    )


def test_wsd_stays_and_then_falls_to_the_floor_at_the_horizon() -> None:
    wsd = schedule(name="wsd", warmup=10, decay=0.2, floor=0.1)
    assert set(factors(wsd, 81)[10:]) == {1.0}
    assert wsd.factor(90) == pytest.approx(0.55)
    assert wsd.factor(99) == pytest.approx(0.1 + 0.9 / 20)
    assert (wsd.factor(100), wsd.factor(500)) == (pytest.approx(0.1), pytest.approx(0.1))


def test_wsd_whose_warmup_reaches_into_the_fall_begins_to_fall_after_it() -> None:
    wsd = schedule(name="wsd", warmup=90, decay=0.2)
    assert wsd.factor(89) == wsd.factor(90) == 1.0
    assert wsd.factor(95) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd", "plateau"])
def test_warmup_rises_evenly_from_its_start_to_the_highest(name: str) -> None:
    warm = factors(schedule(name=name, warmup=4, warmup_from=0.2), 6)
    assert warm[:4] == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert warm[4] == 1.0
    assert factors(schedule(name=name, warmup=0.05), 5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_after_the_warmup_cosine_covers_the_rest() -> None:
    cosine = schedule(name="cosine", warmup=20)
    assert cosine.factor(60) == pytest.approx(0.5)
    assert cosine.factor(40) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_a_warmup_longer_than_the_run_just_rises() -> None:
    assert factors(schedule(name="cosine", warmup=200), 100) == sorted(factors(schedule(warmup=200), 100))


def test_step_and_plateau_need_no_horizon() -> None:
    assert schedule(None, name="step", every=3).factor(7) == pytest.approx(0.01)
    assert schedule(None, name="plateau").factor(7) == 1.0


def values(seed: int, count: int = 60) -> list[float]:
    """Falling at first, then around a level, with a NaN."""
    source = random.Random(seed)
    noisy = [1.0 + 3.0 * 0.8**place + 0.02 * source.random() for place in range(count)]
    noisy[source.randrange(count)] = float("nan")
    return noisy


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("patience", "threshold", "floor"), [(0, 1e-2, 1e-3), (2, 1e-4, 0.0), (3, 0.0, 0.3)])
def test_the_rate_is_lowered_where_torchs_scheduler_lowers_it(
    seed: int, mode: str, patience: int, threshold: float, floor: float
) -> None:
    plateau = Plateau(0.5, patience, threshold, mode, floor)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=patience, threshold=threshold, min_lr=floor, eps=0.0
    )
    cuts = 0
    for value in values(seed):
        before = optimizer.param_groups[0]["lr"]
        reference.step(value)
        assert plateau.observe(value) == (optimizer.param_groups[0]["lr"] < before)
        assert plateau.scale == pytest.approx(optimizer.param_groups[0]["lr"])
        cuts += plateau.scale < before
    assert cuts > 0


def test_the_direction_follows_from_the_metric() -> None:
    rising, falling = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]
    for metric, good, bad in (("accuracy", rising, falling), ("loss", falling, rising)):
        content = Plateau(0.5, 1, 1e-4, None, 0.0, metric)
        assert not any(content.observe(value) for value in good)
        unhappy = Plateau(0.5, 1, 1e-4, None, 0.0, metric)
        assert [unhappy.observe(value) for value in bad] == [False, False, True, False]


@pytest.mark.parametrize("stop", range(0, 60, 4))
def test_a_resumed_plateau_lowers_the_rate_at_the_same_evaluation(stop: int) -> None:
    whole, first, second = (Plateau(0.5, 3, 1e-2, "min", 0.0) for _ in range(3))
    expected = [(whole.observe(value), whole.scale) for value in values(3)]
    seen = [(first.observe(value), first.scale) for value in values(3)[:stop]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    seen += [(second.observe(value), second.scale) for value in values(3)[stop:]]
    assert seen == expected


def test_at_the_floor_the_rate_is_not_lowered() -> None:
    plateau = Plateau(0.1, 0, 0.0, "min", 0.5)
    assert [plateau.observe(1.0) for _ in range(4)] == [False, True, False, False]
    assert plateau.scale == 0.5


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
