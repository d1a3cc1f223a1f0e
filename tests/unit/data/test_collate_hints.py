"""Samples that cannot be collated, and functions that cannot be pickled, are named."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from paceline.data.collate_hints import Collate, explain_pickling


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
