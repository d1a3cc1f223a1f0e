"""How many ranks lie on each axis, from a recipe and a number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError, LayoutError
from paceline.plan.layout import Degrees, derive_layout


def degrees(world: int, nodes: int = 1, **keys: Any) -> Degrees:
    return derive_layout(Config.from_dict(keys), world, nodes).degrees


@pytest.mark.parametrize(
    ("strategy", "world", "nodes", "expected"),
    [
        ("auto", 1, 1, Degrees()),
        ("ddp", 3, 1, Degrees(replicate=3)),
        ("fsdp", 4, 1, Degrees(shard=4)),
        ("fsdp", 1, 1, Degrees()),
        ("hsdp", 8, 2, Degrees(replicate=2, shard=4)),
        ("hsdp", 4, 1, Degrees(replicate=2, shard=2)),
        ("hsdp", 3, 1, Degrees(shard=3)),
        ("tp", 2, 1, Degrees(tensor=2)),
        ("pp", 2, 1, Degrees(pipeline=2)),
    ],
)
def test_a_strategy_is_a_name_for_a_layout(strategy: str, world: int, nodes: int, expected: Degrees) -> None:
    assert degrees(world, nodes, strategy=strategy) == expected


def test_auto_takes_the_rest_of_the_world() -> None:
    layout = {"replicate": "auto", "shard": 2, "tensor": 2}
    assert degrees(12, layout=layout) == Degrees(replicate=3, shard=2, tensor=2)


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ({"layout": {"shard": 3}}, "layout.degrees-and-world"),
        ({"layout": {"shard": 3, "replicate": "auto"}}, "layout.degrees-and-world"),
        ({"layout": {"shard": "auto", "replicate": "auto"}}, "layout.two-autos"),
        ({"layout": {"shard": 4}, "strategy": "fsdp"}, "layout.strategy-and-layout"),
    ],
)
def test_what_can_not_be_is_refused_before_ranks_start(keys: dict[str, Any], code: str) -> None:
    with pytest.raises(LayoutError) as caught:
        degrees(4, **keys)
    assert caught.value.code == code


def test_one_process_strategies_are_refused_in_a_larger_world() -> None:
    for strategy in ("single", "dp", "split"):
        with pytest.raises(ConfigError, match="one process"):
            degrees(2, strategy=strategy)


def test_ranks_along_tensor_and_pipeline_read_the_same_data() -> None:
    assert degrees(16, layout={"pipeline": 2, "replicate": 2, "shard": 2, "tensor": 2}).data_ranks == 4


def test_hsdp_wants_as_many_ranks_on_each_node() -> None:
    config = Config.from_dict({"strategy": "hsdp"})
    with pytest.raises(LayoutError) as caught:
        derive_layout(config, 7, nodes=2)
    assert caught.value.code == "layout.uneven-nodes"
    assert derive_layout(config, 2).degrees == Degrees(shard=2)


def test_the_axis_that_is_offered_for_the_rest_is_a_free_one() -> None:
    with pytest.raises(LayoutError) as caught:
        derive_layout(Config.from_dict({"layout": {"replicate": 2}}), 4)
    assert "shard: auto (2 ranks)" in str(caught.value)
