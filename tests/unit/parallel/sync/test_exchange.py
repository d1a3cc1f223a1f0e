from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor

import hooked
from paceline import dist
from paceline.parallel.sync.exchange import CollectiveQueue, Collectives, Exchange
from worlds import ranks


def swapped(exchange: Exchange, part: int) -> tuple[Tensor, Tensor]:
    """What arrives in both collectives, beside what this thread does."""
    sent = torch.arange(3.0).repeat_interleave(part) + 10 * dist.rank()
    received, gathered = torch.empty_like(sent), torch.empty_like(sent)

    def sequence() -> Collectives[None]:
        yield exchange.all_to_all(received, sent)
        yield exchange.all_gather(gathered, sent[:part] + 1)

    CollectiveQueue().submit(sequence(), received).wait()
    return received, gathered


@ranks(3)
def test_small_and_large_parts_arrive_in_the_order_of_ranks() -> None:
    for part in (4, 100_000):  # a collective of gloo, and messages
        received, gathered = swapped(hooked.own_exchange(), part)
        assert torch.equal(received, torch.tensor([0.0, 10.0, 20.0]).repeat_interleave(part) + dist.rank())
        assert torch.equal(gathered, torch.tensor([1.0, 11.0, 21.0]).repeat_interleave(part))


@ranks(2)
def test_a_message_that_does_not_arrive_is_an_error_of_the_future() -> None:
    exchange = Exchange(torch_dist.new_group(timeout=timedelta(seconds=0.3)))
    if dist.rank() == 0:
        future = exchange.all_gather(torch.zeros(200_000), torch.ones(100_000)).get_future()
        with pytest.raises(RuntimeError):
            future.wait()
