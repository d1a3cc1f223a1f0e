"""Advice on `sync:` for a model on a measured network."""

from __future__ import annotations

import pytest

from paceline.plan.network_model import LinkModel
from paceline.plan.sync_advice import (
    EVERY,
    MethodCost,
    as_matrix,
    compare,
    dense_bytes,
    is_compressed,
    powersgd_bytes,
    sentence,
)

MLP = [(2048, 2048)] * 4  # 64 MiB of gradients
DENSE = 4 * 4 * 2048**2


def buckets(compute: float) -> list[tuple[float, float]]:
    """Two, of which the first is ready in the middle of a backward."""
    return [(0.3 * compute, DENSE / 2), (0.0, DENSE / 2)]


def at(bandwidth: float, compute: float = 0.1) -> tuple[dict[str, MethodCost], str]:
    link = LinkModel(100e-6, bandwidth)
    costs = compare(MLP, compute=compute, buckets=buckets(compute), links={"all_reduce": link}, ranks=2)
    return {cost.name: cost for cost in costs}, sentence(costs, link)


def test_a_slow_network_needs_powersgd() -> None:
    costs, advice = at(25e6)
    assert costs["uncompressed gradients"].waits > 0.9 and costs["int8"].waits > 0.7
    assert advice.startswith("at 0.2 Gb/s this model waits 96 % of each step; powersgd rank 4 brings that to ")
    assert advice.endswith("(sync: {compress: powersgd, rank: 4})")


def test_the_method_that_changes_least_is_chosen_among_those_that_suffice() -> None:
    costs, advice = at(25e6, compute=5.0)
    assert costs["fp16"].waits < 0.15 < costs["uncompressed gradients"].waits
    assert "; fp16 brings that to " in advice and costs["powersgd rank 1"].waits < costs["fp16"].waits


def test_a_fast_network_needs_nothing() -> None:
    _, advice = at(10e9)
    assert "this model waits 3 % of each step, which leaves little to gain" in advice and "sync: {" not in advice


def test_where_nothing_suffices_the_best_method_is_named() -> None:
    costs, advice = at(25e3)
    assert min(costs.values(), key=lambda cost: cost.waits).name in advice and "brings that only to" in advice


def test_bytes_sent_follow_from_the_shapes() -> None:
    costs, _ = at(25e6)
    assert costs["uncompressed gradients"].sent == DENSE  # on two ranks
    assert costs["fp16"].sent == DENSE / 2
    assert costs["int8"].sent == pytest.approx(DENSE / 4, rel=0.02)
    assert costs["powersgd rank 1"].sent == pytest.approx(DENSE / 1024)
    assert costs[f"a round every {EVERY} steps"].sent == pytest.approx(DENSE / 4 / EVERY, rel=0.02)


def test_each_message_takes_the_time_of_its_own_collective() -> None:
    slow, fast = LinkModel(0.0, 1e6), LinkModel(0.0, 1e12)
    links = {"all_reduce": slow, "all_to_all": fast, "all_gather": fast}
    costs = {cost.name: cost for cost in compare(MLP, compute=1.0, buckets=buckets(1.0), links=links, ranks=2)}
    assert costs["fp16"].seconds < 0.001 < costs["powersgd rank 1"].seconds


def test_dense_gradients_are_four_bytes_per_value() -> None:
    assert dense_bytes([(2048, 2048), (2048,), ()]) == 4 * (2048 * 2048 + 2048 + 1)


def test_a_matrix_is_sent_as_two_factors_and_a_vector_as_it_is() -> None:
    found = powersgd_bytes([(2048, 1024), (2048,)], rank=2, min_ratio=2.0)
    assert found == (4 * 2 * 2048, 4 * 2 * 1024, 4 * 2048)
    assert found.total == 4 * (2 * 2048 + 2 * 1024 + 2048)


def test_a_kernel_is_a_matrix_of_its_output_channels() -> None:
    assert as_matrix((64, 32, 3, 3)) == (64, 288)
    assert powersgd_bytes([(64, 32, 3, 3)], rank=1, min_ratio=2.0).total == 4 * (64 + 288)


def test_a_matrix_that_would_shrink_too_little_is_not_compressed() -> None:
    assert is_compressed((8, 8), 2, 2.0)  # 32 values instead of 64
    assert not is_compressed((8, 8), 2, 2.1) and not is_compressed((8, 8), 4, 2.0) and not is_compressed((64,), 1, 1.0)
    assert powersgd_bytes([(8, 8)], rank=4, min_ratio=2.0) == (0, 0, 4 * 64)
