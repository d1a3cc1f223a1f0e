"""Checksums of weights see every bit, and only bits."""

from __future__ import annotations

import pytest
import torch

from paceline.models.weight_bits import checksum

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 127, 128, 1000])
def test_any_changed_element_changes_the_checksum(dtype: torch.dtype, size: int) -> None:
    tensor = torch.arange(size).remainder(2).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    for index in {0, size // 2, size - 1}:
        other = tensor.clone()
        other[index] = 1 if other[index] == 0 else 0
        assert checksum(other) != before


@pytest.mark.parametrize(("size", "begin"), [(256, 0), (9, 0), (300, 1)])
def test_opposite_changes_do_not_cancel(size: int, begin: int) -> None:
    tensor = torch.ones(size + begin)[begin:]
    bits = torch.ones(size + begin).view(torch.int32)[begin:]
    bits[3] += 1
    bits[8] -= 1
    assert checksum(bits.view(torch.float32)) != checksum(tensor)


def test_layout_in_memory_does_not_matter() -> None:
    tensor = torch.randn(12, 24)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(torch.cat([torch.zeros(1), tensor.flatten()])[1:]) == checksum(
        torch.cat([torch.ones(3), tensor.flatten()])[3:]
    )
    assert checksum(torch.empty(0)) == 0
