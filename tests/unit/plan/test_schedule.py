from __future__ import annotations

from typing import Any

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.schedule import SchedulePlan, derive_schedule, pause_step


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_learning_rate_rules_follow_the_batch(rule: str, expected: float) -> None:
    config = Config.from_dict({"optimizer": {"lr": 0.1, "lr_rule": rule, "reference_batch": 32}})
    assert derive_schedule(config, 128, 10, 1, None).lr.value == pytest.approx(expected)


def test_a_rule_without_reference_has_a_code() -> None:
    config = Config.from_dict({"optimizer": {"lr_rule": "linear"}})
    with pytest.raises(ConfigError) as caught:
        derive_schedule(config, 128, 10, 1, None)
    assert caught.value.code == "config.no-reference-batch"


def test_the_horizon_is_the_schedules_own_then_epochs_then_max_steps() -> None:
    own = Config.from_dict({"schedule": {"steps": 7}})
    assert derive_schedule(own, 8, 10, 3, 5).steps.value == 7
    assert derive_schedule(Config(), 8, 10, 3, 5).steps.value == 30
    assert derive_schedule(Config(), 8, 10, None, 5).steps.value == 5


def test_training_without_an_end_has_a_code() -> None:
    with pytest.raises(ConfigError) as caught:
        derive_schedule(Config(), 8, 10, None, None)
    assert caught.value.code == "config.no-end"


def test_a_schedule_that_needs_a_horizon_refuses_data_without_length() -> None:
    config = Config.from_dict({"schedule": {"name": "cosine"}})
    with pytest.raises(ConfigError) as caught:
        derive_schedule(config, 8, None, 3, None)
    assert caught.value.code == "config.no-horizon"


def plan_of(steps_per_epoch: int | None = 10, **schedule: Any) -> SchedulePlan:
    return derive_schedule(Config.from_dict({"schedule": schedule}), 8, steps_per_epoch, 6, None)


def test_a_schedule_in_epochs_is_converted_to_steps_and_says_how() -> None:
    plan = plan_of(name="step", unit="epochs", warmup=1, steps=5, at=[4, 2])
    assert (plan.steps.value, plan.warmup.value, [step.value for step in plan.milestones]) == (50, 10, [20, 40])
    assert plan.steps.reason == "schedule.steps: 5 epochs × 10 steps"
    every = plan_of(name="step", unit="epochs", every=2).every
    assert every is not None
    assert every.value == 20


def test_a_warmup_below_one_is_a_fraction_of_all_steps_in_any_unit() -> None:
    assert plan_of(unit="epochs", warmup=0.5).warmup.value == 30
    assert plan_of(unit="steps", warmup=0.5).warmup.value == 30


@pytest.mark.parametrize(
    "schedule",
    [{"warmup": 1}, {"name": "cosine", "steps": 3}, {"name": "step", "every": 1}, {"name": "step", "at": [1]}],
)
def test_epochs_of_data_without_length_have_a_code(schedule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(None, unit="epochs", **schedule)
    assert caught.value.code == "config.no-horizon"


@pytest.mark.parametrize("schedule", [{"name": "wsd"}, {"name": "linear"}, {"name": "constant", "warmup": 0.1}])
def test_what_is_a_part_of_the_horizon_refuses_data_without_length(schedule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(None, **schedule)
    assert caught.value.code == "config.no-horizon"


@pytest.mark.parametrize(
    ("settings", "code"), [({}, "config.no-cuts"), ({"every": 3, "at": [4]}, "config.contradiction")]
)
def test_a_step_schedule_takes_every_or_at(settings: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(name="step", **settings)
    assert caught.value.code == code


def test_wsd_falls_over_the_last_part_of_the_horizon() -> None:
    decay_start = plan_of(name="wsd", decay=0.25).decay_start
    assert decay_start is not None
    assert decay_start.value == 45


def test_only_rows_that_bear_on_the_run_are_shown() -> None:
    assert set(plan_of().rows()) == {"learning rate", "horizon"}
    assert set(plan_of(None).rows()) == {"learning rate"}
    assert set(plan_of(name="wsd", warmup=3).rows()) == {"learning rate", "horizon", "warm-up", "falls from"}
    assert plan_of(name="step", unit="epochs", at=[2, 4]).rows()["cuts at"].value == "20, 40"
    assert "cut every" in plan_of(name="step", every=2).rows()


@pytest.mark.parametrize(
    ("pause_at", "total", "step"),
    [(None, 100, None), (20, 100, 20), (20, None, 20), (100, 100, None), (0.3, 100, 30), (0.001, 100, 1), (0.5, 1, 1)],
)
def test_a_pause_is_a_step_or_a_fraction_of_all_steps(
    pause_at: int | float | None, total: int | None, step: int | None
) -> None:
    assert pause_step(pause_at, total) == step


def test_a_fraction_of_an_unknown_number_of_steps_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"config\.no-horizon"):
        pause_step(0.5, None)
