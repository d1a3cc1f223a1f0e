from __future__ import annotations

from collections import UserDict, defaultdict
from typing import Any

import pytest
import torch

from paceline.data.batches import apply, floors, layout_of, rows_of, samples_in
from paceline.errors import DataError

IMAGES = [torch.full((3, 4 + number % 2, 4), float(number)) for number in range(4)]
SAME_SIZE = [torch.full((3, 4, 4), float(number)) for number in range(4)]
TARGETS = [{"boxes": torch.zeros(number, 4), "labels": torch.zeros(number)} for number in range(4)]


def test_what_masks_and_ignored_targets_lower_is_told_by_tensor() -> None:
    batch = {"x": torch.ones(4), "more": [torch.tensor([5, 3]), torch.tensor([True, True])], "name": "a"}
    assert floors(batch) == {0: 1.0, 1: 3.0, 2: 1.0}
    batch["x"][1], batch["more"][0][1], batch["more"][1][0] = 0, -100, False
    assert floors(batch) == {0: 0.0, 1: -100.0, 2: 0.0}
    others = [torch.ones(0), torch.ones(1, dtype=torch.complex64), torch.zeros(1 << 19), torch.zeros(2).to_sparse()]
    assert floors([*others, torch.zeros(2, dtype=torch.uint16)]) == {}


def test_tensors_and_lists_as_long_as_the_batch_are_sliced() -> None:
    batch = UserDict(x=torch.arange(6), names=list("abcdef"), version="1", scale=torch.tensor(3.0), more=[1, 2])
    part = rows_of(batch, 2, 4)
    assert type(part) is UserDict
    assert (part["x"].tolist(), part["names"], part["more"]) == ([2, 3], ["c", "d"], [1, 2])
    assert batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
    nested = apply(defaultdict(list, a=[torch.ones(2)]), lambda tensor: tensor * 2)
    assert nested["a"][0].tolist() == [2.0, 2.0] and nested["other"] == []


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGES, TARGETS),
        (tuple(SAME_SIZE), tuple(TARGETS)),
        {"images": SAME_SIZE, "labels": torch.zeros(4)},
        list(zip(SAME_SIZE, range(4), strict=True)),
        [{"image": image, "id": number} for number, image in enumerate(IMAGES)],
        (torch.zeros(4, 7), [torch.zeros(4, 2), torch.zeros(4)]),  # parts of parts, as default_collate returns them
    ],
)
def test_lists_with_one_item_per_sample_are_sliced_as_lists(batch: Any) -> None:
    assert samples_in(batch) == 4
    assert samples_in(rows_of(batch, 1, 3)) == 2
    if not isinstance(batch, dict) and batch[0] is IMAGES:
        part = rows_of(batch, 1, 3)
        assert [int(image[0, 0, 0]) for image in part[0]] == [1, 2] and [len(t["boxes"]) for t in part[1]] == [1, 2]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(20, 4, 3), torch.zeros(4)),  # time-first
        {"x": torch.zeros(4, 3), "class_weights": torch.zeros(10)},
        {"images": SAME_SIZE},  # four images, or four parts of three samples
        [{"image": image} for image in SAME_SIZE],
    ],
)
def test_a_batch_whose_number_of_samples_is_unclear_is_not_sliced(batch: Any) -> None:
    with pytest.raises(DataError, match=r"batch.* \(\d+, ") as caught:
        rows_of(batch, 0, 2)
    assert caught.value.code == "data.batch-dim"


def test_a_later_batch_is_read_like_the_first_one() -> None:
    first = {"images": SAME_SIZE, "labels": torch.zeros(4)}
    known = layout_of(first)
    assert known == (4, "lists")
    three = {"images": SAME_SIZE[:3], "labels": torch.zeros(3)}  # three images with three channels
    assert [int(image[0, 0, 0]) for image in rows_of(three, 1, 3, known[1])["images"]] == [1, 2]
