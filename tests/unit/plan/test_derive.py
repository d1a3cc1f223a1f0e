from __future__ import annotations

from typing import Any

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.derive import SchedulePlan, derive_batch, derive_schedule
from paceline.plan.layout import derive_layout


def plan(ranks: int, loader_batch: int | None = None, **values: int) -> tuple[int, int, int]:
    config = Config.from_dict(values)
    derived = derive_batch(config, derive_layout(config, ranks), loader_batch)
    return derived.size, int(derived.micro_batch.value), derived.groups


@pytest.mark.parametrize(
    ("ranks", "values", "expected"),
    [
        (1, {"batch": 12}, (12, 12, 1)),
        (4, {"batch": 12}, (12, 3, 1)),
        (4, {"batch": 10}, (10, 3, 1)),
        (2, {"batch": 64, "micro_batch": 8}, (64, 8, 4)),
        (3, {"batch": 64, "micro_batch": 8}, (64, 8, 3)),
        (2, {"batch": 64, "accumulate": 4}, (64, 8, 4)),
        (2, {"micro_batch": 8, "accumulate": 4}, (64, 8, 4)),
        (2, {"micro_batch": 8}, (16, 8, 1)),
        (2, {"batch": 64, "micro_batch": 8, "accumulate": 4}, (64, 8, 4)),
        (3, {"batch_per_rank": 8}, (24, 8, 1)),
        (2, {}, (32, 16, 1)),
    ],
)
def test_any_two_of_batch_micro_batch_and_accumulate_give_the_third(
    ranks: int, values: dict[str, int], expected: tuple[int, int, int]
) -> None:
    assert plan(ranks, **values) == expected


def test_a_loaders_batch_size_is_the_global_batch() -> None:
    assert plan(4, loader_batch=20) == (20, 5, 1)


@pytest.mark.parametrize(
    ("ranks", "values", "loader_batch"),
    [
        (2, {"batch": 64, "micro_batch": 8, "accumulate": 3}, None),
        (2, {"batch": 64, "batch_per_rank": 8}, None),
        (2, {"batch": 64}, 32),
        (2, {"batch_per_rank": 3}, 32),
    ],
)
def test_values_that_disagree_have_a_code(ranks: int, values: dict[str, int], loader_batch: int | None) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(ranks, loader_batch, **values)
    assert caught.value.code == "config.contradiction"


def test_a_batch_that_depends_on_the_ranks_says_so() -> None:
    config = Config.from_dict({"batch_per_rank": 8})
    derived = derive_batch(config, derive_layout(config, 3))
    assert "depends on the number of ranks" in derived.batch.reason


def test_every_derived_value_has_a_reason() -> None:
    config = Config.from_dict({"batch": 64, "schedule": {"name": "cosine", "warmup": 0.1}})
    rows = {**derive_batch(config, derive_layout(config, 2)).rows(), **derive_schedule(config, 64, 10, 3, None).rows()}
    assert set(rows) == {
        "world", "strategy", "layout", "batch", "micro_batch", "accumulate", "learning rate", "horizon", "warm-up",
    }  # fmt: skip
    assert all(row.reason for row in rows.values())


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
    assert (plan.steps.value, plan.warmup.value, [cut.value for cut in plan.cuts]) == (50, 10, [20, 40])
    assert plan.steps.reason == "schedule.steps: 5 epochs × 10 steps"
    every = plan_of(name="step", unit="epochs", every=2).every
    assert every is not None
    assert every.value == 20


def test_a_warmup_below_one_is_a_fraction_of_all_steps_in_any_unit() -> None:
    assert plan_of(unit="epochs", warmup=0.5).warmup.value == 30
    assert plan_of(unit="steps", warmup=0.5).warmup.value == 30


@pytest.mark.parametrize(
    "schedule",
    [
        {"warmup": 1},
        {"name": "cosine", "steps": 3},
        {"name": "step", "every": 1},
        {"name": "step", "at": [1]},
    ],
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
    fall = plan_of(name="wsd", decay=0.25).fall
    assert fall is not None
    assert fall.value == 45


def test_only_rows_that_bear_on_the_run_are_shown() -> None:
    assert set(plan_of().rows()) == {"learning rate", "horizon"}
    assert set(plan_of(None).rows()) == {"learning rate"}
    assert set(plan_of(name="wsd", warmup=3).rows()) == {"learning rate", "horizon", "warm-up", "falls from"}
    assert plan_of(name="step", unit="epochs", at=[2, 4]).rows()["cuts at"].value == "20, 40"
    assert "cut every" in plan_of(name="step", every=2).rows()


def test_single_in_a_world_of_two_has_a_code() -> None:
    with pytest.raises(ConfigError) as caught:
        derive_layout(Config.from_dict({"strategy": "single"}), 2)
    assert caught.value.code == "config.single-in-a-world"
