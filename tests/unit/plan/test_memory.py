"""`strategy: auto` and what does not fit, on machines that do not exist."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.plan.layout import Degrees, derive_layout
from paceline.plan.memory import GIB, MachineFacts, ModelSize, choose_layout, require_fit, required_bytes

SMALL = ModelSize(124_000_000, largest_block=38_000_000, tensor_degrees=(2, 4), stages=12)
SEVEN = ModelSize(7_000_000_000, largest_block=210_000_000, tensor_degrees=(2, 4, 8), stages=32)
HUGE = ModelSize(70_000_000_000, largest_block=900_000_000, tensor_degrees=(2, 4, 8), stages=80)
FEW_LARGE_BLOCKS = ModelSize(6_000_000_000, largest_block=3_000_000_000, tensor_degrees=(2, 4, 8), stages=2)
WITHOUT_PLAN = ModelSize(6_000_000_000, largest_block=800_000_000, stages=8)


@pytest.mark.parametrize(
    ("recipe", "size", "machine", "expected"),
    [
        # 124M × 16 bytes are 1.8 GiB: fits anywhere.
        ({}, SMALL, MachineFacts(8, 1, 80 * GIB), Degrees(replicate=8)),
        # 7B × 16 are 104 GiB: not on one GPU of 80, but an eighth of it is 13 GiB, and two blocks.
        ({}, SEVEN, MachineFacts(8, 1, 80 * GIB), Degrees(shard=8)),
        # The same on two nodes: sharded within a node, replicated across nodes.
        ({}, SEVEN, MachineFacts(16, 2, 80 * GIB), Degrees(replicate=2, shard=8)),
        # Without optimizer state 7B × 8 are 52 GiB: fits into 56.
        ({"optimizer": {"name": "sgd"}}, SEVEN, MachineFacts(8, 1, 80 * GIB), Degrees(replicate=8)),
        # With an average beside the weights it is 78 GiB, and does not.
        ({"optimizer": {"name": "sgd"}, "ema": 0.999}, SEVEN, MachineFacts(8, 1, 80 * GIB), Degrees(shard=8)),
        # 70B do not fit into a node's 8 × 56 GiB: sharded across all 32 ranks.
        ({}, HUGE, MachineFacts(32, 4, 80 * GIB), Degrees(shard=32)),
        # A block of 3B takes 33 GiB when gathered: every layer is cut in 8.
        ({}, FEW_LARGE_BLOCKS, MachineFacts(8, 1, 24 * GIB), Degrees(tensor=8)),
        # A model without a plan has stages instead: 11 GiB each, or its largest block.
        ({}, WITHOUT_PLAN, MachineFacts(8, 1, 24 * GIB), Degrees(pipeline=8)),
        ({}, SEVEN, MachineFacts(1, 1, 80 * GIB), Degrees()),
    ],
)
def test_auto_chooses_by_the_memory_estimate(
    recipe: dict[str, Any], size: ModelSize, machine: MachineFacts, expected: Degrees
) -> None:
    plan = choose_layout(Config.from_dict(recipe), size, machine)
    assert plan.degrees == expected
    assert machine.ranks == 1 or "bytes" in plan.reason


def test_a_model_that_no_layout_holds_is_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError) as caught:
        choose_layout(Config.from_dict({}), HUGE, MachineFacts(4, 1, 24 * GIB))
    assert caught.value.code == "layout.does-not-fit"
    assert "1043.1 GiB" in str(caught.value)


def test_a_requested_layout_that_does_not_fit_in_memory_is_refused() -> None:
    config = Config.from_dict({"strategy": "ddp"})
    with pytest.raises(LayoutError) as caught:
        require_fit(config, SEVEN, derive_layout(config, 8), MachineFacts(8, 1, 80 * GIB))
    assert caught.value.code == "layout.does-not-fit"
    fsdp = Config.from_dict({"strategy": "fsdp"})
    require_fit(fsdp, SEVEN, derive_layout(fsdp, 8), MachineFacts(8, 1, 80 * GIB))


def test_offloading_takes_the_state_off_the_device() -> None:
    config = Config.from_dict({"strategy": "fsdp", "fsdp": {"offload": True}})
    require_fit(config, SEVEN, derive_layout(config, 1), MachineFacts(1, 1, 24 * GIB))


def test_half_precision_halves_what_is_gathered_and_nothing_else() -> None:
    full, half = (required_bytes(Config.from_dict({"precision": p}), SEVEN, Degrees(shard=8)) for p in ("fp32", "bf16"))
    assert full - half == 3 * 2 * SEVEN.largest_block


def test_nodes_of_different_sizes_are_not_given_copies_each() -> None:
    assert choose_layout(Config.from_dict({}), SEVEN, MachineFacts(7, 2, 80 * GIB)).degrees == Degrees(shard=7)
