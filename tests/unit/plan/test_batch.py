from __future__ import annotations

from typing import Any

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError, PacelineError
from paceline.plan.batch import derive_batch
from paceline.plan.layout import derive_layout
from paceline.plan.schedule import derive_schedule


def plan(ranks: int, loader_batch: int | None = None, **values: Any) -> tuple[int, int, int]:
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


@pytest.mark.parametrize(
    ("ranks", "values", "expected"),
    [
        (1, {"batch": 32}, (32, 3, 12)),
        (3, {"batch": 32}, (32, 3, 4)),
        (12, {"batch": 32, "micro_batch": 32}, (32, 3, 1)),
        (2, {"batch": 32, "accumulate": 5}, (32, 3, 6)),
        (4, {"batch": 8}, (8, 1, 2)),
        (8, {"batch": 48, "slices": 24}, (48, 2, 3)),
        (2, {"batch": 48, "slices": 24, "micro_batch": 2}, (48, 2, 12)),
    ],
)
def test_everywhere_a_batch_has_the_same_slices(
    ranks: int, values: dict[str, int], expected: tuple[int, int, int]
) -> None:
    assert plan(ranks, deterministic="everywhere", **values) == expected


def test_settings_that_slices_replace_are_named() -> None:
    config = Config.from_dict({"deterministic": "everywhere", "batch": 32, "accumulate": 5})
    rows = derive_batch(config, derive_layout(config, 2)).rows()
    assert rows["micro_batch"].reason.endswith("(deterministic: everywhere; accumulate has no effect)")
    assert rows["accumulate"].reason == "12 slices / 2 data ranks"
    assert rows["slices"].value == 12
    assert "one CPU thread" in rows["slices"].reason


@pytest.mark.parametrize(
    ("ranks", "values", "code", "fix"),
    [
        (8, {"batch": 32}, "layout.slices-and-ranks", "slices: 24"),
        (5, {"batch": 32}, "layout.slices-and-ranks", "slices: 15"),
        (3, {"batch": 8}, "layout.slices-and-ranks", "batch to a multiple of 3"),
        (2, {"batch": 64, "micro_batch": 3}, "config.slices-and-micro-batch", "slices: 24"),
        (2, {"batch_per_rank": 16}, "config.contradiction", "set batch"),
        (2, {"micro_batch": 16}, "config.contradiction", "set batch"),
    ],
)
def test_what_slices_can_not_be_is_refused(ranks: int, values: dict[str, int], code: str, fix: str) -> None:
    with pytest.raises(PacelineError) as caught:
        plan(ranks, deterministic="everywhere", **values)
    assert caught.value.code == code
    assert fix in str(caught.value)
