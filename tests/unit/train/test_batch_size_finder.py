from __future__ import annotations

import pytest

import tiny
from paceline.errors import TrainError
from paceline.train import batch_size_finder


@pytest.mark.parametrize(("limit", "most"), [(1, 64), (5, 64), (37, 64), (64, 64), (1000, 64), (3, 3), (1, 1)])
def test_the_search_finds_the_largest_size_to_an_eighth(limit: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = batch_size_finder.search(fits, most)
    best = min(limit, most)
    assert found <= best <= found + max(1, found // 8)
    assert found in tried and len(tried) == len(set(tried))


def test_a_model_for_which_no_sample_fits_has_a_code() -> None:
    with pytest.raises(TrainError) as caught:
        batch_size_finder.search(lambda size: False, 8)
    assert caught.value.code == "train.finder-nothing-fits"


def test_the_finder_is_refused_on_cpu_with_the_reason() -> None:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(micro_batch="auto", device="cpu")
    assert caught.value.code == "train.finder-on-cpu" and "swap" in str(caught.value)
