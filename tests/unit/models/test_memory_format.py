from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.models.memory_format import as_channels_last, convert_weights, input_change


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


def test_a_cast_comes_first() -> None:
    change = input_change(lambda tensor: tensor.double(), channels_last=True)
    assert change is not None
    changed = change(torch.zeros(2, 3, 4, 5))
    assert changed.dtype is torch.float64 and changed.is_contiguous(memory_format=torch.channels_last)
    assert input_change(None, channels_last=False) is None


def test_weights_have_the_strides_of_their_gradients() -> None:
    convolutions = [nn.Conv2d(4, 6, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(1, 6, 3), nn.ConvTranspose2d(4, 6, 2)]
    for convolution in convolutions:
        assert convert_weights(convolution) == 1
        images = as_channels_last(torch.randn(2, 1 if convolution.in_channels == 1 else 4, 8, 8))
        convolution(images).sum().backward()
        assert convolution.weight.grad is not None
        assert convolution.weight.grad.stride() == convolution.weight.stride(), convolution
