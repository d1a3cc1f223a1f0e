from __future__ import annotations

import pytest

from paceline.plan.traffic import COLLECTIVES, Traffic


def taken(traffic: Traffic) -> dict[str, float]:
    return {name: sent for name, sent in zip(COLLECTIVES, traffic.take(), strict=True) if sent}


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
