from __future__ import annotations

import torch
import torch.distributed as torch_dist

import hooked
from paceline.sync.casts import cast_mean
from worlds import ranks


@ranks(3)
def test_values_are_rounded_twice_and_sums_not_at_all() -> None:
    exchange = hooked.own_exchange()
    own = torch_dist.get_rank()
    # 2048 + 1 + 1 in fp16 sums is 2048: each partial sum would be rounded.
    flat = torch.full((7,), [2048.0, 1.0, 1.0][own] * 3)
    for dtype in (torch.float16, torch.bfloat16):
        mean = cast_mean(flat, dtype, exchange)
        assert mean.dtype == flat.dtype and torch.equal(mean, torch.tensor([2050.0] * 7).to(dtype).float())
    assert cast_mean(torch.empty(0), torch.float16, exchange).numel() == 0


@ranks(2)
def test_half_of_the_bytes_are_sent() -> None:
    exchange = hooked.own_exchange()
    cast_mean(torch.randn(10_000), torch.float16, exchange)
    assert dict(exchange.traffic.sent) == {"all_to_all": 10_000, "all_gather": 10_000}


@ranks(2)
def test_values_that_have_16_bits_already_are_sent_in_their_dtype() -> None:
    flat = torch.tensor([1e30, 1.0 + torch_dist.get_rank()], dtype=torch.bfloat16)
    mean = cast_mean(flat, torch.float16, hooked.own_exchange())
    assert torch.equal(mean, torch.tensor([1e30, 1.5], dtype=torch.bfloat16))  # infinite in fp16
