from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.models.weights import as_channels_last, checksum, convert_weights


@pytest.mark.parametrize(
    ("shape", "memory_format"), [((2, 3, 4, 5), torch.channels_last), ((2, 3, 4, 5, 6), torch.channels_last_3d)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_images_and_videos_are_converted(
    shape: tuple[int, ...], memory_format: torch.memory_format, dtype: torch.dtype
) -> None:
    images = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    converted = as_channels_last(images)
    assert converted.is_contiguous(memory_format=memory_format) and torch.equal(converted, images)
    assert as_channels_last(converted) is converted


def test_other_tensors_stay() -> None:
    sparse = torch.zeros(2, 3, 4, 5).to_sparse()
    nested = torch.nested.nested_tensor([torch.zeros(3, 4, 5)], layout=torch.jagged)
    for tensor in (torch.zeros(()), torch.zeros(2, 3), torch.zeros(2, 3, 4), sparse, nested):
        assert as_channels_last(tensor) is tensor


def test_weights_have_the_strides_of_their_gradients() -> None:
    convolutions = [nn.Conv2d(4, 6, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(1, 6, 3), nn.ConvTranspose2d(4, 6, 2)]
    for convolution in convolutions:
        assert convert_weights(convolution) == 1
        images = as_channels_last(torch.randn(2, 1 if convolution.in_channels == 1 else 4, 8, 8))
        convolution(images).sum().backward()
        assert convolution.weight.grad is not None
        assert convolution.weight.grad.stride() == convolution.weight.stride(), convolution


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
