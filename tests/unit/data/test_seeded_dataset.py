"""Samples under generators of their own."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import Dataset

from paceline.data.seeded_dataset import SeededBatches
from paceline.errors import DataError


class Forgetful(Dataset[Any]):
    def __getitem__(self, index: int) -> None:
        pass


def test_a_sample_that_is_none_is_named_with_the_line_of_getitem() -> None:
    with pytest.raises(DataError, match=r"Forgetful\.__getitem__\(7\) \(.*test_seeded_dataset\.py:15\)") as caught:
        SeededBatches(Forgetful(), 0, list, own_collate=False).__getitems__((0, [7]))
    assert caught.value.code == "data.no-sample"
    assert SeededBatches(Forgetful(), 0, list, own_collate=True).__getitems__((0, [7])) == [None]
