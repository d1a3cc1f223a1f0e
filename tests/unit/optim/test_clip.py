from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from paceline.optim.clip import StepGradients, total_norm

SHAPES = [(4, 3), (3,), (), (2, 3, 2), (0, 4)]


def gradients(*dtypes: torch.dtype, scale: float = 3.0) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    return [
        (scale * torch.randn(shape, generator=source, dtype=torch.float64)).to(dtypes[place % len(dtypes)])
        for place, shape in enumerate(SHAPES)
    ]


def parameters(values: list[Tensor]) -> list[nn.Parameter]:
    """Parameters that have copies of these as gradients, for torch's functions."""
    made = [nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(made, values, strict=True):
        parameter.grad = value.clone()
    return made


def clip(values: list[Tensor], norm: float | None, value: float | None) -> Tensor | None:
    gradients = StepGradients(0, values)
    gradients.clip(norm, value)
    return gradients.known_norm


def assert_same(values: list[Tensor], reference: list[nn.Parameter]) -> None:
    for value, parameter in zip(values, reference, strict=True):
        torch.testing.assert_close(value, parameter.grad)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64,), (torch.float32, torch.float64)])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_by_norm_is_torchs(dtypes: tuple[torch.dtype, ...], limit: float) -> None:
    values = gradients(*dtypes)
    reference = parameters(values)
    expected = nn.utils.clip_grad_norm_(reference, limit)
    found = clip(values, limit, None)
    assert found is not None
    torch.testing.assert_close(found, expected)
    assert_same(values, reference)


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)])
def test_clipping_by_value_is_torchs(dtypes: tuple[torch.dtype, ...]) -> None:
    values = gradients(*dtypes)
    reference = parameters(values)
    nn.utils.clip_grad_value_(reference, 1.5)
    assert clip(values, None, 1.5) is None
    assert_same(values, reference)
    assert max(value.abs().max().item() for value in values if value.numel()) == 1.5


def test_value_comes_before_norm_and_the_norm_that_is_kept_before_both() -> None:
    values = gradients(torch.float64)
    reference = parameters(values)
    norm = total_norm(values)
    nn.utils.clip_grad_value_(reference, 1.5)
    nn.utils.clip_grad_norm_(reference, 2.0)
    found = clip(values, 2.0, 1.5)
    assert found is not None
    assert torch.equal(found, norm)
    assert_same(values, reference)
    torch.testing.assert_close(total_norm(values), torch.tensor(2.0, dtype=torch.float64), rtol=1e-5, atol=0.0)


def test_the_norm_is_computed_once() -> None:
    calls: list[int] = []

    def norm_of(values: list[Tensor]) -> Tensor:
        calls.append(len(values))
        return torch.tensor(10.0)

    values = [torch.tensor([3.0, 4.0])]
    found = StepGradients(0, values, norm_of)
    assert found.norm() is found.norm() and found.norm().item() == 10.0
    found.clip(1.0, None)
    assert calls == [1] and found.norm().item() == 10.0
    torch.testing.assert_close(values[0], torch.tensor([0.3, 0.4]))


def test_the_norm_does_not_hold_after_clipping_by_value() -> None:
    values = [torch.tensor([30.0, 4.0])]
    found = StepGradients(0, values)
    assert found.norm().item() == pytest.approx(916**0.5)
    found.clip(1.0, 3.0)
    assert found.norm().item() == pytest.approx(916**0.5)
    torch.testing.assert_close(values[0], torch.full((2,), 0.5).sqrt())


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64, torch.float32)])
@pytest.mark.parametrize("factor", [0.25, torch.tensor(0.25, dtype=torch.float64)])
def test_a_factor_keeps_the_dtypes(dtypes: tuple[torch.dtype, ...], factor: Tensor | float) -> None:
    values = gradients(*dtypes)
    expected = [value * 0.25 for value in values]
    StepGradients(0, values).multiply(factor)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(values, expected, strict=True))


def test_float64_gradients_have_a_float64_norm() -> None:
    tiny = [torch.ones(1, dtype=torch.float64), torch.full((1,), 1e-6, dtype=torch.float64)]
    assert total_norm(tiny).item() == pytest.approx((1 + 1e-12) ** 0.5, rel=1e-15)
    assert total_norm(gradients(torch.float32)).dtype == torch.float32


def test_the_norm_of_half_precision_gradients_does_not_overflow() -> None:
    large = [torch.full((64,), 60000.0, dtype=torch.float16)]
    assert total_norm(large).item() == pytest.approx(480000.0, rel=1e-3)
    clip(large, 8.0, None)
    torch.testing.assert_close(large[0], torch.ones(64, dtype=torch.float16))


def test_without_limits_nothing_happens() -> None:
    values = gradients(torch.float32)
    before = copy.deepcopy(values)
    assert clip(values, None, None) is None
    assert all(torch.equal(a, b) for a, b in zip(values, before, strict=True))


def test_no_gradients_have_a_norm_of_zero() -> None:
    assert total_norm([]).item() == 0.0
    StepGradients(0, []).multiply(2.0)
    found = clip([], 1.0, 1.0)
    assert found is not None
    assert found.item() == 0.0


def test_a_gradient_of_zero_stays_zero() -> None:
    values = [torch.zeros(3)]
    clip(values, 1.0, None)
    assert torch.equal(values[0], torch.zeros(3))


def test_a_nan_is_seen_in_the_norm() -> None:
    values = [torch.tensor([1.0, float("nan")]), torch.ones(2)]
    found = clip(values, 1.0, None)
    assert found is not None
    assert found.isnan()
