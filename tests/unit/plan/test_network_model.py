"""Latency and bandwidth of a link, fitted to measured times."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.plan.network_model import COLLECTIVES, COUNTED, LinkModel, Traffic, exposed_after, free_cores, scaled

SIZES = [1024 * 4**power for power in range(10)]
LINK = LinkModel(latency=50e-6, bandwidth=25e6)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_latency_and_bandwidth_are_recovered_from_noisy_times(collective: str, ranks: int) -> None:
    noise = random.Random(0)
    points = [(size, LINK.time(collective, size, ranks) * noise.uniform(0.95, 1.05)) for size in SIZES]
    found = LinkModel.fit(collective, ranks, points)
    assert found.latency == pytest.approx(LINK.latency, rel=0.1)
    assert found.bandwidth == pytest.approx(LINK.bandwidth, rel=0.03)
    assert 0.01 < found.worst_error < 0.08


def test_exact_times_have_no_error() -> None:
    found = LinkModel.fit("all_reduce", 4, [(size, LINK.all_reduce_time(size, 4)) for size in SIZES])
    assert found.worst_error == pytest.approx(0, abs=1e-6)


def test_the_error_is_that_of_the_worst_point() -> None:
    points = [(size, LINK.all_reduce_time(size, 2)) for size in SIZES]
    size, seconds = points[5]
    found = LinkModel.fit("all_reduce", 2, [*points[:5], (size, 2 * seconds), *points[6:]])
    assert 0.3 < found.worst_error < 0.6
    assert found.bandwidth == pytest.approx(LINK.bandwidth, rel=0.15)


def test_a_fit_never_predicts_a_negative_latency_or_bandwidth() -> None:
    falling = LinkModel.fit("all_reduce", 2, [(1024, 3e-3), (4096, 2e-3), (16384, 1e-3)])
    assert falling.latency > 0 and falling.all_reduce_time(1 << 30, 2) == falling.all_reduce_time(1, 2)
    faster_than_linear = LinkModel.fit("all_reduce", 2, [(1024, 1e-6), (4096, 1e-4), (16384, 1e-2)])
    assert faster_than_linear.latency == 0 and faster_than_linear.bandwidth > 0


def test_one_size_can_not_be_fitted() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        LinkModel.fit("all_reduce", 2, [(1024, 1e-3), (1024, 2e-3)])


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_bytes_take_longer_and_one_rank_takes_no_time(collective: str) -> None:
    times = [LINK.time(collective, size, 4) for size in SIZES]
    assert all(shorter < longer for shorter, longer in pairwise(times))
    assert LINK.time(collective, 1 << 30, 1) == 0


def test_more_ranks_take_longer() -> None:
    times = [LINK.all_reduce_time(1 << 20, ranks) for ranks in (1, 2, 4, 8, 64)]
    assert all(fewer < more for fewer, more in pairwise(times))
    assert times[-1] < 2 * times[1] + 2 * 64 * LINK.latency  # a ring sends less than twice the bytes on any number


def test_buckets_are_reduced_one_after_the_other_from_when_they_are_ready() -> None:
    assert exposed_after([5.0, 0.0], [2.0, 2.0]) == 2.0  # the first is done before the second is ready
    assert exposed_after([1.0, 0.0], [2.0, 2.0]) == 3.0  # the second waits for the first
    assert exposed_after([9.0, 5.0], [2.0, 2.0]) == 0.0  # all done before the last gradient
    assert exposed_after([], []) == 0.0


def test_communication_without_cores_of_its_own_does_not_overlap() -> None:
    assert exposed_after([9.0, 5.0], [2.0, 2.0], overlap=0.0) == 4.0
    assert exposed_after([5.0, 0.0], [2.0, 2.0], overlap=0.5) == 3.0
    assert [free_cores(16, ranks) for ranks in (1, 8, 10, 16, 32)] == [1.0, 1.0, pytest.approx(0.6), 0.0, 0.0]


@pytest.mark.parametrize(("mode", "ranks", "first", "batch"), [
    ("strong", 4, 1, 32), ("weak", 4, 1, 128), ("weak", 4, 2, 64), ("strong", 4, 2, 32),
])  # fmt: skip
def test_strong_scaling_keeps_the_batch_and_weak_scaling_that_of_each_rank(
    mode: str, ranks: int, first: int, batch: int
) -> None:
    assert scaled(Config(batch=32), mode, ranks, first).batch == batch


def test_a_batch_per_rank_becomes_a_batch() -> None:
    recipe = Config(micro_batch=4, accumulate=2)
    strong, weak = scaled(recipe, "strong", 4, 1), scaled(recipe, "weak", 4, 1)
    assert (strong.batch, strong.micro_batch, strong.accumulate) == (8, 4, None)
    assert (weak.batch, weak.micro_batch) == (32, 4)
    assert scaled(Config(batch_per_rank=8), "strong", 4, 2).batch == 16


def test_a_batch_smaller_than_the_ranks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="batch-smaller-than-ranks"):
        scaled(Config(batch=2), "strong", 4, 1)
    assert scaled(Config(batch=2), "weak", 4, 1).batch == 8


def taken(traffic: Traffic) -> dict[str, float]:
    return {name: sent for name, sent in zip(COUNTED, traffic.take(), strict=True) if sent}


def test_a_ring_sends_every_part_of_a_tensor_twice_but_its_own() -> None:
    traffic = Traffic()
    traffic.all_reduce(1200, ranks=3)
    traffic.all_gather(100, ranks=3)
    traffic.all_to_all(300, ranks=3)
    assert taken(traffic) == {"all_reduce": 1600, "all_gather": 200, "all_to_all": 200}


def test_bytes_are_taken_once() -> None:
    traffic = Traffic()
    traffic.all_reduce(10, ranks=2)
    assert taken(traffic) == {"all_reduce": 10}
    traffic.all_reduce(4, ranks=2)
    assert taken(traffic) == {"all_reduce": 4} and taken(traffic) == {} and traffic.sent["all_reduce"] == 14


@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_rank_but_the_first_receives_a_broadcast_once(ranks: int) -> None:
    sent = []
    for rank in range(ranks):
        traffic = Traffic()
        traffic.broadcast(8, ranks, rank)
        sent.append(traffic.sent["broadcast"])
    assert sum(sent) == 8 * (ranks - 1)
    assert sent[0] == 8 * (ranks - 1).bit_length() == max(sent)
