"""Samples that can't be collated, functions that can't be pickled and layers with inputs of another dtype."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.data.input_hints import Collate, explain_dtypes, explain_pickling


def notes_of(samples: list[Any]) -> str:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        Collate("Pairs (train.py:7)")(samples)
    return "\n".join(caught.value.__notes__)


def test_samples_of_different_shapes_are_described() -> None:
    notes = notes_of([{"x": torch.zeros(8), "y": 0}, {"x": torch.zeros(9), "y": 0}])
    assert "the samples of Pairs (train.py:7) differ" in notes
    assert "{'x': tensor (8,), 'y': int} and {'x': tensor (9,), 'y': int}" in notes


def test_samples_of_a_type_that_torch_does_not_collate_are_described() -> None:
    assert "can't be collated: (object, int)" in notes_of([(object(), 0), (object(), 1)])


def test_samples_are_collated_as_torch_does() -> None:
    inputs, targets = Collate("")([(torch.zeros(2), 0), (torch.ones(2), 1)])
    assert inputs.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert targets.tolist() == [0, 1]


def test_a_nested_function_that_cannot_be_pickled_is_named() -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return samples

    with pytest.raises(AttributeError) as caught, explain_pickling(collate, None):
        pickle.dumps(collate)
    assert "collate_fn of the DataLoader (" in caught.value.__notes__[0]
    assert "is defined in another function" in caught.value.__notes__[0]


def dtype_notes(model: nn.Module, batch: Tensor) -> str:
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
    notes = dtype_notes(nn.Sequential(nn.Flatten(), nn.Linear(4, 1)), torch.ones(2, 4, dtype=dtype))
    assert f"1 (Linear) received {str(dtype).removeprefix('torch.')} inputs of shape (2, 4)" in notes
    assert "return float32 inputs from the dataset (.float())" in notes


def test_a_conversion_inside_the_model_is_not_blamed_on_the_dataset() -> None:
    notes = dtype_notes(Doubling(), torch.ones(2, 4))
    assert "head (Linear) received float64" in notes
    assert "dataset" not in notes


def test_float_indices_of_an_embedding_are_named() -> None:
    assert "computes with int64" in dtype_notes(nn.Sequential(nn.Embedding(3, 2)), torch.ones(2, 4))


def test_an_error_about_shapes_gets_no_note() -> None:
    assert dtype_notes(nn.Linear(3, 1), torch.ones(2, 4)) == ""
