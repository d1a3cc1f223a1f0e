from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist

import hooked
from paceline.errors import LayoutError
from paceline.models.gpt import GPT
from paceline.parallel.sync.powersgd import PowerSGD, orthonormalize, random_rows
from worlds import ranks


@ranks(2)
def test_gradients_of_low_rank_become_exact() -> None:
    """Their mean has rank 2. Two matrices of one size and one of another share a bucket."""
    model = hooked.ChosenGradients((30, 40), (50,), (30, 40), (24, 36))
    ddp = hooked.wrap(model, PowerSGD(hooked.own_exchange(), rank=2))
    torch.manual_seed(0)
    factors = [[(torch.randn(n), torch.randn(m)) for _ in range(2)] for n, m in ((30, 40), (30, 40), (24, 36))]
    own = [torch.outer(*pairs[torch_dist.get_rank()]) for pairs in factors]
    mean = [(torch.outer(*pairs[0]) + torch.outer(*pairs[1])) / 2 for pairs in factors]
    for _ in range(3):
        got = hooked.step(ddp, [own[0], torch.ones(50), own[1], own[2]])
    for gradient, expected in zip((got[0], got[2], got[3]), mean, strict=True):
        assert torch.allclose(gradient, expected, atol=1e-4)


@ranks(2)
def test_a_gradient_that_was_zero_is_found_again() -> None:
    model = hooked.ChosenGradients((30, 40), (30, 40))
    ddp = hooked.wrap(model, PowerSGD(hooked.own_exchange(), rank=2))
    torch.manual_seed(0)
    value = torch.outer(torch.randn(30), torch.randn(40))
    for _ in range(3):
        got = hooked.step(ddp, [torch.zeros(30, 40), value])
        assert torch.equal(got[0], torch.zeros(30, 40))
    for _ in range(3):
        got = hooked.step(ddp, [value, torch.zeros(30, 40)])
    assert torch.allclose(got[0], value, atol=1e-4)


@ranks(2)
def test_nothing_to_compress_is_an_error() -> None:
    model = hooked.ChosenGradients((30, 40), (50,))
    with pytest.raises(LayoutError, match=r"rank 10 compresses no parameter by 2 × .* 30 × 40") as raised:
        hooked.wrap(model, PowerSGD(hooked.own_exchange(), rank=10))
    assert raised.value.code == "layout.nothing-to-compress"


@ranks(2)
def test_a_rank_above_the_size_of_a_matrix_leaves_it_uncompressed() -> None:
    for rank in (6, 100):
        model = hooked.ChosenGradients((5, 4000), (8, 8), (300, 300))
        compression = PowerSGD(hooked.own_exchange(), rank=rank, min_ratio=1.0)
        ddp = hooked.wrap(model, compression)
        got = hooked.step(ddp, hooked.random_like(model, torch_dist.get_rank(), 0))
        means = hooked.true_mean(model, 0)
        assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(got[:2], means[:2], strict=True))
        assert compression.local_state().keys() == {"weights.2"}


@ranks(2)
def test_matrices_that_save_less_than_the_minimum_ratio_are_uncompressed() -> None:
    model = hooked.ChosenGradients((20, 20), (40, 40))  # compressed by 5 and by 10
    compression = PowerSGD(hooked.own_exchange(), rank=2, min_ratio=10.0)
    ddp = hooked.wrap(model, compression)
    hooked.step(ddp, hooked.random_like(model, torch_dist.get_rank(), 0))
    assert compression.local_state().keys() == {"weights.1"}


@ranks(2)
def test_the_first_steps_are_uncompressed() -> None:
    model = hooked.ChosenGradients((30, 40))
    ddp = hooked.wrap(model, PowerSGD(hooked.own_exchange(), start=2))
    exact = []
    for step in range(4):
        (got,) = hooked.step(ddp, hooked.random_like(model, torch_dist.get_rank(), step))
        exact.append(torch.allclose(got.double(), hooked.true_mean(model, step)[0], atol=1e-6))
    assert exact == [True, True, False, False]


@ranks(2)
def test_the_gpt_of_the_default_recipe_sends_a_fiftieth() -> None:
    model = GPT(layers=3, width=128, heads=4, context=96)
    exchange = hooked.own_exchange()
    ddp = hooked.wrap(model, PowerSGD(exchange, rank=1), bucket_cap_mb=25)
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(torch_dist.get_rank()))
    ddp(tokens[:, :-1], tokens[:, 1:])["loss"].backward()
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())  # bytes, on two ranks
    assert sum(exchange.traffic.sent.values()) <= dense / 50


def test_rows_become_orthonormal() -> None:
    rows = torch.randn(3, 4, 50)
    orthonormalize(rows)
    assert torch.allclose(rows @ rows.mT, torch.eye(4).expand(3, 4, 4), atol=1e-5)


def test_zero_and_dependent_rows_vanish_or_are_replaced() -> None:
    rows = torch.randn(3, 3, 50)
    rows[0, 1] = 0.0
    rows[1, 2] = rows[1, 0] - 2 * rows[1, 1]
    rows[2] = 0.0
    replaced = rows.clone()
    orthonormalize(rows)
    expected = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.allclose(rows @ rows.mT, torch.diag_embed(expected), atol=1e-3)
    orthonormalize(replaced, random_rows("a", 0, rows[0]).expand_as(rows))
    assert torch.allclose(replaced @ replaced.mT, torch.eye(3).expand(3, 3, 3), atol=1e-3)


@pytest.mark.parametrize("bad", [1e25, float("inf"), float("nan")])
@pytest.mark.parametrize("row", [0, 1])
def test_a_row_that_is_not_finite_or_overflows_stays_visible(bad: float, row: int) -> None:
    rows = torch.randn(2, 2, 50)
    rows[1, row, 7] = bad
    orthonormalize(rows, torch.randn(2, 2, 50))
    assert rows[0].isfinite().all() and rows[1, row].isnan().all()
