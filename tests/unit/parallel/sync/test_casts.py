from __future__ import annotations

import torch
import torch.distributed as torch_dist

import hooked
from paceline.parallel.sync.casts import BLOCK, Blocks, cast_mean, int8_mean
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


def gradients(rank: int, length: int = 5000) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


@ranks(3)
def test_the_mean_and_what_was_lost_add_up() -> None:
    exchange = hooked.own_exchange()
    for length in (1, 2, 5, 770, 5000):
        mean, lost = int8_mean(gradients(torch_dist.get_rank(), length), exchange)
        true = torch.stack([gradients(rank, length) for rank in range(3)]).mean(0)
        assert (mean - true).abs().max() <= 2 * true.abs().max() / 127
        torch_dist.all_reduce(lost)
        assert torch.allclose(mean + lost / 3, true, atol=1e-6)
    mean, lost = int8_mean(torch.empty(0), exchange)
    assert mean.numel() == lost.numel() == 0


@ranks(2)
def test_the_error_is_relative_to_the_largest_value_of_a_block() -> None:
    """Also for values whose squares or quotients are outside of the range of fp32."""
    for size in (1e-28, 1e-20, 1.0, 1e30):
        flat = gradients(torch_dist.get_rank(), 4 * BLOCK)
        flat[:BLOCK] *= size
        mean, _ = int8_mean(flat, hooked.own_exchange())
        true = (gradients(0, 4 * BLOCK) + gradients(1, 4 * BLOCK)) / 2
        true[:BLOCK] *= size
        assert (mean - true)[:BLOCK].abs().max() <= 0.02 * true[:BLOCK].abs().max()
        assert (mean - true)[BLOCK:].abs().max() <= 0.02 * true[BLOCK:].abs().max()


@ranks(2)
def test_values_that_are_too_small_for_a_scale_are_kept_back() -> None:
    flat = torch.full((600,), 1e-40)
    mean, lost = int8_mean(flat, hooked.own_exchange())
    assert torch.equal(mean, torch.zeros(600)) and torch.equal(lost, flat)


@ranks(2)
def test_a_quarter_of_the_bytes_is_sent() -> None:
    exchange = hooked.own_exchange()
    length = 100_000
    int8_mean(torch.randn(length), exchange)
    dense = 2 * 4 * length / 2  # an all-reduce of fp32 on two ranks
    assert sum(exchange.traffic.sent.values()) < 0.256 * dense


def test_blocks_cover_a_tensor_with_little_padding() -> None:
    for ranks_ in (1, 2, 3, 8):
        for length in (0, 1, 3, 100, 1000, 4096, 99_999):
            blocks = Blocks.of(length, ranks_)
            assert length <= blocks.padded < length + ranks_ * BLOCK
            assert blocks.size <= BLOCK and blocks.size % 4 == 0
