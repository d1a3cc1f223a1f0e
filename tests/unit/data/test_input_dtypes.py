"""Errors of torch about dtypes get a note that names the layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.data.input_dtypes import explain_dtypes


def notes_of(model: nn.Module, batch: Tensor) -> str:
    with pytest.raises(RuntimeError) as caught, explain_dtypes(model):
        model(batch).sum().backward()
    return "\n".join(getattr(caught.value, "__notes__", []))


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x.double())
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_the_layer_that_received_another_dtype_is_named(dtype: torch.dtype) -> None:
    notes = notes_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), torch.ones(2, 4, dtype=dtype))
    assert f"1 (Linear) received {str(dtype).removeprefix('torch.')} inputs of shape (2, 4)" in notes
    assert "return float32 inputs from the dataset (.float())" in notes


def test_a_conversion_inside_the_model_is_not_blamed_on_the_dataset() -> None:
    notes = notes_of(Doubling(), torch.ones(2, 4))
    assert "head (Linear) received float64" in notes
    assert "dataset" not in notes


def test_float_indices_of_an_embedding_are_named() -> None:
    assert "computes with int64" in notes_of(nn.Sequential(nn.Embedding(3, 2)), torch.ones(2, 4))


def test_an_error_about_shapes_gets_no_note() -> None:
    assert notes_of(nn.Linear(3, 1), torch.ones(2, 4)) == ""
